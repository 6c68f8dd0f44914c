# docker build -f deploy/docker/vllm.Dockerfile -t kvbaton-vllm:0.32.0 .
# vLLM with the package that registers it at kvbaton (integrations/vllm).
FROM vllm/vllm-openai:v0.32.0
COPY integrations/vllm /tmp/kvbaton-vllm
RUN pip install --no-cache-dir --no-deps /tmp/kvbaton-vllm
ENTRYPOINT []
CMD ["vllm", "serve", "--help"]
