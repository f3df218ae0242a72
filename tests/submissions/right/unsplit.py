"""Right, but on tiles that the compiler does not split over the two vector cores: lost time."""

from harness.textbook import textbook_fwd


def attention_fwd(q, k, v, causal=False, sm_scale=None):
    return textbook_fwd(q, k, v, causal, sm_scale, block_m=64, block_n=64)
