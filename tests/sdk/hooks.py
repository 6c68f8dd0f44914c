"""What schemathesis does not know by itself."""

import msgpack
import schemathesis


@schemathesis.serializer("application/msgpack")
def as_msgpack(_context, value):
    return msgpack.packb(value, default=str)
