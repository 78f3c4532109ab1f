import pytest
from peers.figures import measure
from peers.prompts import make_prompts


def test_figures_of_a_machine_whose_speed_is_known():
    """100 µs a prompt token, 4 ms a decode step whatever the batch."""
    prompts = {"p32": [0] * 32, "p512": [0] * 512, "p16": [[0] * 128] * 16}

    def seconds(batch, new):
        return 1e-4 * sum(map(len, batch)) + 4e-3 * (new - 1)

    assert measure(seconds, prompts, runs=3) == {
        "prefill_512": pytest.approx(10_000),
        "one_stream": pytest.approx(250),
        "streams_16": pytest.approx(16 * 64 / (0.2048 + 0.252)),
        "decode_only_16": pytest.approx(4000),
    }


def test_noise_larger_than_the_signal_is_an_error():
    prompts = {"p32": [0] * 32, "p512": [0] * 512, "p16": [[0] * 128] * 16}
    with pytest.raises(SystemExit, match="something else uses this machine"):
        measure(lambda batch, new: 1.0, prompts)


def test_prompts_have_the_lengths_that_the_figures_name(smollm2):
    prompts = make_prompts(smollm2)
    assert [len(prompts["p32"]), len(prompts["p512"]), *map(len, prompts["p16"])] == [32, 512, *[128] * 16]
    assert len({tuple(prompt[:8]) for prompt in prompts["p16"]}) == 16
