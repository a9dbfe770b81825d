"""What the model makes of a few prompts while it learns: shown, and kept in samples.jsonl."""

from __future__ import annotations

from pathlib import Path

from moe_tp.errors import ConfigError
from moe_tp.infer.text import sample_text
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.mesh import Mesh
from moe_tp.train.config import FinetuneConfig
from moe_tp.train.journal import Journal
from moe_tp.train.metrics import LineWriter
from moe_tp.train.tokenizer import Tokenizer, load_tokenizer

SAMPLES = "samples.jsonl"


def check_samples(config: FinetuneConfig, mesh: Mesh) -> None:
    """Refuse sampled generations in a layout that cannot generate.

    Raises:
        ConfigError: cp is above 1.
    """
    if config.train.sample_prompts and mesh.size("cp") > 1:
        raise ConfigError(
            f"train.sample_prompts needs cp=1, which generation runs on, and the layout is "
            f"{mesh.layout}; leave the prompts out, or choose tp in place of cp"
        )


class Samples:
    """The samples of a run.

    Args:
        config: of the run.
        output: the run's folder; None writes nothing (ranks other than 0).
        done: steps already done; samples of later ones, of a run that was killed, are dropped.

    Raises:
        DataError: there is no tokenizer.
    """

    def __init__(self, config: FinetuneConfig, output: Path | None, *, done: int) -> None:
        self.prompts, self.tokens = config.train.sample_prompts, config.train.sample_tokens
        self.tokenizer: Tokenizer = load_tokenizer(config.data.tokenizer or config.model)
        path = None if output is None else output / SAMPLES
        self.lines = LineWriter(path, keep_below=done + 1)

    def draw(self, model: Decoder, step: int, journal: Journal) -> None:
        """Sample, show and write; greedily, so that samples of different steps compare.

        Collectives: those of `sample_text`.
        """
        made = sample_text(model, self.tokenizer, self.prompts, max_new_tokens=self.tokens)
        for number, sample in enumerate(made):
            self.lines.write({"step": step, "prompt": sample.prompt, "text": sample.text})
            journal.text(step, f"sample {number}", f"{sample.prompt}{sample.text}")

    def close(self) -> None:
        """Close the file."""
        self.lines.close()
