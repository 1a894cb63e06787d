"""The families of models that have decoders of our own: see `prepare`."""

from __future__ import annotations

# Classes whose layers are: norm, attention with rotary positions, norm, gated MLP.
FAMILIES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
