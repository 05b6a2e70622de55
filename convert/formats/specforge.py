"""EAGLE-3 as SpecForge writes it and SGLang serves it.

Like the authors' format, with another architecture, with layer ids, and with EAGLE-3.1's two norms: id i is the output of layer i, which
vLLM and Draftsmith call i + 1, the input of the next layer.

`fc_norm` and `norm_output` mean what SGLang computes with them (python/sglang/srt/models/llama_eagle3.py, from 0.5.12 on): a norm for each of
the target's states before `fc`, and that the next step reads the state that the head reads. An absent key means false there. SpecForge's own
class, until its pull request 879 of September 2026, fed back the state before the norm whatever `norm_output` was, took an absent key for
true, and left out the head's norm where it was false: so false is not written.
"""

from functools import partial

from draftsmith.convert.formats.base import Format
from draftsmith.convert.formats.eagle3 import by_midlayer, recognize_midlayer
from draftsmith.drafters.eagle3 import eagle3_layout, ids_unsaid
from draftsmith.drafters.layout import Entry

FORMAT = Format(
    name="specforge",
    title="EAGLE-3 as SpecForge writes it and SGLang serves it",
    layouts={
        "eagle3": eagle3_layout(
            old_rope=True,
            ids=Entry(
                "layer_ids", tuple, "eagle_config.eagle_aux_hidden_state_layer_ids", default=ids_unsaid, shift=-1
            ),
            flags=("fc_norm", "norm_output"),
            several_layers=False,
            false_left_out=True,
            names=by_midlayer,
            supported={"layer_ids": lambda ids: min(ids) > 0},  # the embedding, id 0, is no layer's output
            fixed={"eagle_config.use_aux_hidden_state": True},
            derived={"architectures": lambda _: ["LlamaForCausalLMEagle3"], "model_type": lambda _: "llama"},
            irrelevant=frozenset({"target_model_type"}),
        )
    },
    sglang_algorithm="EAGLE3",
    recognize=partial(recognize_midlayer, architecture="LlamaForCausalLMEagle3"),
)
