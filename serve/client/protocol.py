"""Names and limits on which the served model, its supervisor and its clients agree."""

MODEL_VARIABLE = "PENJING_MODEL"
"""Environment variable: the folder of the checkpoint or artifact."""
ENGINE_VARIABLE = "PENJING_ENGINE"
"""Environment variable: the engine's settings as JSON."""
PULSE_VARIABLE = "PENJING_PULSE"
"""Environment variable: the file of the pulse (pulse.py); absent: the model runs without a supervisor."""
ADAPTERS_VARIABLE = "PENJING_ADAPTERS"
"""Environment variable: the file that lists the adapters which a decoder shall have (adapter_list.py); absent: they do
not change."""

PING = "ping"
"""Request parameter of a call that asks the served model for a sign of life; the rest of the request is not read."""

DECODER, CLASSIFIER, ENCODER, GRAPH, TOWERS = "llm", "classifier", "encoder", "graph", "towers"
"""What the models of penjing's own families are called on the server."""

SIGHT = "sight"
"""What a decoder sees with is called on the server where it is a model of its own."""

MAX_TEXT_BYTES = 1 << 20
"""Of one text of an encoder, of which the tokenizer keeps the beginning."""

REQUEST_SECONDS = 120.0
"""Until a request of a benchmark has failed."""
