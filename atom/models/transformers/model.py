"""Any architecture by transformers' own modelling code, with paged attention and layers of ours."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from atom.config import ConfigError
from atom.model_ops.attention.metadata import AttentionMetadata, ModelInput, ModelOutput
from atom.model_ops.attention.mha import Attention
from atom.model_ops.embedding import (
    OutputHead,
    ParallelLMHead,
    TiedLMHead,
    VocabParallelEmbedding,
)
from atom.model_ops.kernels.torch.elementwise import Rope
from atom.model_ops.layer_context import LayerContext
from atom.model_ops.layernorm import RMSNorm
from atom.model_ops.rotary import AttentionInputs, StepRotation
from atom.model_ops.weight_mapping import WeightMapping
from atom.models.base import CausalLM, check_aux_layer_ids, spread_aux_layer_ids
from atom.models.transformers.attention import replace_attentions
from atom.models.transformers.decoder import (
    DiffersError,
    FoundDecoder,
    find_decoder,
    only_multiplies,
)
from atom.models.transformers.images import TransformersImageEncoder
from atom.models.transformers.layers import (
    Embedding,
    Head,
    materialise,
    replace_linears,
    replace_mlps,
    replace_norms,
    split,
)
from atom.models.transformers.probe import (
    LANGUAGE_MODEL,
    PAGED,
    LayerCall,
    LayerFacts,
    decoder_layers,
    head_logits,
    is_experts,
    parameters_on_meta,
    probe,
    run,
    take_base,
    text_network,
)
from atom.models.transformers.weights import Names
from atom.models.vision.encoder import ImageEncoder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)


class TransformersForCausalLM(CausalLM):
    """A model of transformers' classes; source of names and computation: its modelling code.

    `check.py` has tried a small copy of it before.

    Args:
        model_class: transformers' class with the head.

    Raises:
        ConfigError: saying what is not honoured.
    """

    def __init__(
        self, config: PretrainedConfig, context: LayerContext, model_class: type[PreTrainedModel]
    ) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        config._attn_implementation = PAGED
        text, inner = config.get_text_config(), ""
        if text is not config:
            inner = LANGUAGE_MODEL
            config.vision_config._attn_implementation = "sdpa"
        with parameters_on_meta():
            model = model_class(config).eval()
        self._names = Names(model, inner)
        _check_experts(model, context)
        base = text_network(model.get_submodule(model.base_model_prefix))
        plan = split(base, context)
        facts = probe(base)
        self._layers = decoder_layers(base, facts)
        name, head = _named(model, model.get_output_embeddings(), "output head")
        self.base, self.hf = base, model
        self.vision = self._take_tower(take_base(model), context)
        self._embedding = self._take_embedding(context)
        self.tied = bool(config.tie_word_embeddings)
        config = text
        self._head_name = name
        self._head = self._take_head(head, config, context)
        replace_mlps(self.base, plan, self._names, context)
        replace_attentions(self.base, facts, plan, self._names, context)
        replace_linears(self.base, plan, self._names, context)
        replace_norms(self.base, self._names, context)
        self._attentions = tuple(_attention(layer, context) for layer in facts)
        self.attentions = nn.ModuleList(self._attentions)
        self._find_ours(config, context)
        materialise(self.base, self._names, context)
        materialise(self.hf, self._names, context)
        self._names.stack_experts(self.base)
        size = facts[0].key_size
        self._rope: Rope = context.ops.resolve("rope", context.dtype, head_dim=size)
        self.aux_layer_ids: tuple[int, ...] = ()
        self._boundaries: dict[int, torch.Tensor] = {}

    def _find_ours(self, config: PretrainedConfig, context: LayerContext) -> None:
        """Let a decoder and a head of ours compute the model, if they compute the same."""
        # In a tuple, so that its modules keep the checkpoint's names.
        self._decoder: tuple[FoundDecoder, ...] = ()
        columns = self._embedding.in_features, int(config.vocab_size)
        has_bias = self.hf.get_submodule(self._head_name).bias is not None
        self._only_multiplies = not has_bias and only_multiplies(self.hf, self._head_name, columns)
        name = type(self.hf).__name__
        try:
            decoder = find_decoder(self.base, self._layers, self._attentions, context)
        except DiffersError as error:
            self.op_by_op = f"transformers' modelling code of {name} is needed: {error}"
            return
        self._decoder = (decoder,)
        if not self._only_multiplies:
            self.op_by_op = f"transformers' modelling code of the head of {name} is needed"
        if context.device.type != "meta":
            logger.info("%s: tries found that its layers compute what atom's decoder does", name)

    def _take_tower(
        self, whole: PreTrainedModel, context: LayerContext
    ) -> TransformersImageEncoder | None:
        """What is left of the base without its text network."""
        if whole is self.base or not context.images:
            return None
        whole._modules[LANGUAGE_MODEL] = None
        materialise(whole, self._names, context)
        return TransformersImageEncoder(whole)

    @property
    def image_encoder(self) -> ImageEncoder | None:
        return self.vision

    def _take_embedding(self, context: LayerContext) -> Embedding:
        name, like = _named(self.base, self.base.get_input_embeddings(), "input embedding")
        if not isinstance(like, nn.Embedding):
            raise ConfigError(f"its input embedding is a {type(like).__name__}")
        ours = Embedding(like, context, self._names.of_base(name))
        self.base.set_submodule(name, ours)
        return ours

    def _take_head(
        self, head: nn.Module, config: PretrainedConfig, context: LayerContext
    ) -> OutputHead:
        if not isinstance(head, nn.Linear) or head.out_features != config.vocab_size:
            raise ConfigError("its output head is no matrix with a row per token")
        ours: OutputHead
        if self.tied:
            ours = TiedLMHead(self._embedding, context)
        else:
            ours = ParallelLMHead(head.out_features, head.in_features, context, self._head_name)
        bias = None
        if head.bias is not None:
            if context.group.size > 1:
                raise ConfigError("its output head has a bias, which ranks do not share")
            bias = context.empty(head.out_features)
        self.hf.set_submodule(self._head_name, Head(ours, bias))
        return ours

    @property
    def weight_mapping(self) -> WeightMapping:
        return self._names.mapping(self, self._head_name if self.tied else None)

    @property
    def token_embedding(self) -> VocabParallelEmbedding:
        return self._embedding

    @property
    def output_head(self) -> OutputHead:
        return self._head

    @property
    def final_norm(self) -> RMSNorm:
        if self._decoder:
            return self._decoder[0].norm
        raise ConfigError(f"{type(self.hf).__name__} of transformers has no norm of ours")

    def forward(self, model_input: ModelInput) -> ModelOutput:
        if self._decoder:
            output: ModelOutput = self._decoder[0](model_input)
            return output
        given = {"input_ids": model_input.input_ids[None]}
        if model_input.images is not None:
            embeds = self._embedding(model_input.input_ids[None])[0]
            given = {"inputs_embeds": model_input.images.fill(embeds)[None]}
        hidden = run(
            self.base,
            _Paged(self._attentions, model_input.attention, self._rope),
            position_ids=model_input.positions[None],
            **given,
        )
        aux = tuple(self._boundaries[i] for i in self.aux_layer_ids)
        self._boundaries.clear()
        return ModelOutput(hidden[0], aux)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._only_multiplies:
            whole: torch.Tensor = self._head(hidden_states)
            return whole
        logits = head_logits(self.hf, hidden_states)
        return logits.float()

    def set_aux_layer_ids(self, layer_ids: tuple[int, ...]) -> None:
        check_aux_layer_ids(layer_ids, len(self._attentions))
        if layer_ids and self._layers is None:
            raise ConfigError("its layers are no list, so no hidden states between them are known")
        self.aux_layer_ids = layer_ids
        if self._decoder:
            self._decoder[0].aux_layer_ids = layer_ids
            return
        for boundary in layer_ids:
            self._watch(boundary)

    def _watch(self, boundary: int) -> None:
        """Keep what enters a layer, or what leaves the last."""
        assert self._layers is not None

        def entering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._boundaries[boundary] = (args[0] if args else kwargs["hidden_states"])[0]

        def leaving(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            self._boundaries[boundary] = hidden[0]

        if boundary < len(self._layers):
            self._layers[boundary].register_forward_pre_hook(entering, with_kwargs=True)
        else:
            self._layers[-1].register_forward_hook(leaving)

    def default_aux_layer_ids(self) -> tuple[int, ...]:
        return spread_aux_layer_ids(len(self._attentions))


class _Paged:
    """Attention over the paged KV cache in one step."""

    def __init__(
        self, layers: Sequence[Attention], metadata: AttentionMetadata, rope: Rope
    ) -> None:
        self._layers = layers
        self._metadata = metadata
        self._rope = rope
        # By the cosines that layers share, which are kept so that no others get their id.
        self._rotations: dict[int, tuple[torch.Tensor, AttentionInputs]] = {}

    def attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        layer = self._layers[module.layer_idx]
        q, k, values = (x[0].transpose(0, 1) for x in (q, k, v))
        if q.shape[2] != values.shape[2]:  # they are cached with the same size
            q, k, values = (F.pad(x, (0, layer.head_dim - x.shape[2])) for x in (q, k, values))
        out = layer.attend(q.contiguous(), k.contiguous(), values.contiguous(), self._metadata)
        heads: torch.Tensor = out.view(1, -1, layer.num_heads, layer.head_dim)
        return heads[..., : v.shape[3]]

    def rotate_and_attend(
        self, layer: int, qkv: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        known = self._rotations.get(id(cos))
        if known is None:
            rows = torch.arange(cos.shape[1], device=cos.device)
            half = cos.shape[2] // 2
            table = torch.cat((cos[0, :, :half], sin[0, :, :half]), -1).float()
            rotation = StepRotation(table, False, self._rope)
            inputs = AttentionInputs(rows, self._metadata, rotation)
            known = self._rotations[id(cos)] = cos, inputs
        attention = self._layers[layer]
        q, k, v = (x.view(x.shape[0], -1, attention.head_dim) for x in qkv)
        return attention.forward(q, k, v, known[1])


def _attention(layer: LayerFacts, context: LayerContext) -> Attention:
    size = max(layer.key_size, layer.value_size)
    heads = layer.num_heads, layer.num_kv_heads
    return Attention(*heads, size, layer.scale, context, layer.window)


def _check_experts(model: PreTrainedModel, context: LayerContext) -> None:
    """Refuse experts that a checkpoint has quantised."""
    for name, module in model.named_modules():
        if is_experts(module) and context.quant.method_for(name, kind="experts") is not None:
            raise ConfigError(
                f"{name}: quantised experts are not supported in transformers' modelling code"
            )


def _named(root: nn.Module, wanted: nn.Module | None, what: str) -> tuple[str, nn.Module]:
    for name, module in root.named_modules():
        if wanted is not None and module is wanted:
            return name, wanted
    raise ConfigError(f"it has no {what}")
