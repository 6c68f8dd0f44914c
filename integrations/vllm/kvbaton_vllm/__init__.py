"""vLLM's NixlConnector with its handshake over kvbaton's HTTP registry.

Only ``kvbaton_vllm.connector`` and what stands below it import vLLM; everything else runs anywhere.
"""

__version__ = "0.1.0"
