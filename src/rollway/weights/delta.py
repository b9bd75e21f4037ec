# temporary: moved to rollway.weights.transports.delta.format
from rollway.weights.transports.delta.format import Encoded as Encoded
from rollway.weights.transports.delta.format import apply as apply
from rollway.weights.transports.delta.format import decode as decode
from rollway.weights.transports.delta.format import encode as encode
from rollway.weights.transports.delta.format import encode_all as encode_all
