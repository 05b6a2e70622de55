"""EAGLE-3 as SpecForge writes it and SGLang serves it.

Like the authors' format, with another architecture and with layer ids: id i is the output of layer i, which vLLM and Draftsmith
call i + 1, the input of the next layer.
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
            flags=False,
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
