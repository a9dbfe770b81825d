"""Generation on the training mesh: cache, sampling, stop tokens, text."""

from moe_tp.infer.generate import Generated, generate
from moe_tp.infer.sampling import Sampling
from moe_tp.infer.text import Sample, sample_text

__all__ = ["Generated", "Sample", "Sampling", "generate", "sample_text"]
