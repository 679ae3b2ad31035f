"""Image encoders, the projector, and the insertion of encoded images into rows of tokens, at their placeholders.

Encoders of SigLIP and CLIP, and the projector, are sharded over the tensor-parallel ranks. Modules and parameters have
the names of Hugging Face's ``SiglipVisionModel``, ``CLIPVisionModel`` and LLaVA projector. Images do not attend to each
other, so neither sequence nor context parallelism shards them: each of those ranks encodes the images of its rows, with
the gradients of its own positions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from energon_lite.errors import UsageError
from energon_lite.trainer.models.config import ModelConfig, VisionConfig
from energon_lite.trainer.models.execution import CompiledBlocks, computed_again, residual
from energon_lite.trainer.models.interface import on_device
from energon_lite.trainer.models.named_layers import adopt_norm
from energon_lite.trainer.models.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import ParameterLayout, indivisible, new_parameter

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def encoder_mesh(vision: VisionConfig, mesh: ParallelMesh) -> ParallelMesh:
    """Return the mesh for the encoder: its rows are never sharded along the sequence."""
    mesh = dataclasses.replace(mesh, sequence_parallel=False)
    if vision.tp is None:
        return mesh
    groups = {name: group for name, group in mesh.process_groups.items() if name != "tp"}
    return dataclasses.replace(mesh, tp=1, process_groups=groups)


def _whole(module: nn.Module) -> None:
    """Mark parameters that were made for one rank as whole on every rank."""
    for p in module.parameters():
        p.parallel_layout = dataclasses.replace(p.parallel_layout, sharded_dim=None)  # type: ignore[attr-defined]


def layer_norm(config: ModelConfig, vision: VisionConfig, mesh: ParallelMesh) -> nn.LayerNorm:
    """Make LayerNorm with weight and bias (Ba et al., arXiv:1607.06450), whole on every rank."""
    norm = nn.LayerNorm(vision.hidden_size, vision.norm_eps)
    adopt_norm(norm, config, mesh, sum_over=())
    return norm


class PatchProjection(nn.Module):
    """Linear projection of each patch, with weights in the shape of a convolution."""

    def __init__(self, config: ModelConfig, vision: VisionConfig, mesh: ParallelMesh):
        super().__init__()
        self.size = config.patch_size
        width = vision.hidden_size
        dtype = config.torch_dtype
        layout = ParameterLayout((width, 3, self.size, self.size), std=(3 * self.size**2) ** -0.5)
        self.weight = new_parameter(layout, mesh, dtype)
        self.bias = new_parameter(ParameterLayout((width,)), mesh, dtype) if vision.kind == "siglip" else None

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Project ``[n, 3, height, width]`` -> ``[n, patches, hidden]`` by rows; drop pixels over at the edges."""
        height, width = (side // self.size * self.size for side in pixels.shape[-2:])
        patches = F.pixel_unshuffle(pixels[:, :, :height, :width], self.size).flatten(2).transpose(1, 2)
        return F.linear(patches, self.weight.flatten(1), self.bias)


class PositionTable(nn.Module):
    """Learned vectors for the positions of a square grid of patches, after one for CLIP's class token.

    For images of another size, the grid is interpolated bicubically, as transformers does.
    """

    def __init__(self, config: ModelConfig, vision: VisionConfig, mesh: ParallelMesh):
        super().__init__()
        self.grid = config.image_size // config.patch_size
        self.before = int(vision.kind == "clip")
        layout = ParameterLayout((self.before + self.grid**2, vision.hidden_size), std=config.init_std)
        self.weight = new_parameter(layout, mesh, config.torch_dtype)

    def forward(self, rows: int, columns: int) -> torch.Tensor:
        """Return the position vectors of a grid, ``[before + rows * columns, hidden]``."""
        if (rows, columns) == (self.grid, self.grid):
            return self.weight
        first, table = self.weight.split([self.before, self.grid**2])
        # As matrix products, whose gradients are deterministic; those of the operator are not on a GPU.
        down, across = (_bicubic(number, self.grid, like=self.weight) for number in (rows, columns))
        table = torch.einsum("rg,ck,gkh->rch", down, across, table.unflatten(0, (self.grid, self.grid)))
        return torch.cat([first, table.flatten(0, 1)])


def _bicubic(outputs: int, inputs: int, *, like: torch.Tensor) -> torch.Tensor:
    """Return the matrix ``[outputs, inputs]`` of bicubic interpolation along one dimension."""
    unit = torch.eye(inputs, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    made = F.interpolate(unit[None, None], size=(outputs, inputs), mode="bicubic", align_corners=False)
    return made[0, 0].to(like.dtype)


class VisionEmbeddings(nn.Module):
    """Embedding of patches and positions and, with CLIP, of a class token before them."""

    def __init__(self, config: ModelConfig, vision: VisionConfig, mesh: ParallelMesh):
        super().__init__()
        self.class_embedding: nn.Parameter | None = None
        if vision.kind == "clip":
            layout = ParameterLayout((vision.hidden_size,), std=config.init_std)
            self.class_embedding = new_parameter(layout, mesh, config.torch_dtype)
        self.patch_embedding = PatchProjection(config, vision, mesh)
        self.position_embedding = PositionTable(config, vision, mesh)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patch_embedding(pixels)
        if self.class_embedding is not None:
            x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1)
        size = self.patch_embedding.size
        return x + self.position_embedding(pixels.shape[-2] // size, pixels.shape[-1] // size)


class VisionAttention(nn.Module):
    """Self-attention without a mask; a rank has ``1/tp`` of the heads."""

    def __init__(self, config: ModelConfig, vision: VisionConfig, mesh: ParallelMesh, *, output_std: float):
        super().__init__()
        if vision.num_heads % mesh.tp:
            raise indivisible(f"an image encoder of {vision.num_heads} heads", vision.num_heads, mesh)
        width, dtype = vision.hidden_size, config.torch_dtype
        make = partial(ColumnParallelLinear, width, width, mesh, bias=True, std=config.init_std, dtype=dtype)
        self.head_dim = width // vision.num_heads
        self.q_proj, self.k_proj, self.v_proj = make(), make(), make()
        self.out_proj = RowParallelLinear(width, width, mesh, bias=True, std=output_std, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.q_proj.enter(x)
        made = (layer(x, entered=True) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (features.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for features in made)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class VisionFeedForward(nn.Module):
    """Feed-forward layer ``fc2(activation(fc1(x)))``."""

    def __init__(self, config: ModelConfig, vision: VisionConfig, mesh: ParallelMesh, *, output_std: float):
        super().__init__()
        width, inner, dtype = vision.hidden_size, vision.ffn_size, config.torch_dtype
        self.activation = ACTIVATIONS[vision.activation]
        self.fc1 = ColumnParallelLinear(width, inner, mesh, bias=True, std=config.init_std, dtype=dtype)
        self.fc2 = RowParallelLinear(inner, width, mesh, bias=True, std=output_std, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class VisionBlock(nn.Module):
    """One layer: attention and feed-forward, each on a normed input and added to the residual stream."""

    def __init__(self, config: ModelConfig, vision: VisionConfig, mesh: ParallelMesh):
        super().__init__()
        output_std = config.init_std / (2 * vision.num_layers) ** 0.5
        self.layer_norm1 = layer_norm(config, vision, mesh)
        self.self_attn = VisionAttention(config, vision, mesh, output_std=output_std)
        self.layer_norm2 = layer_norm(config, vision, mesh)
        self.mlp = VisionFeedForward(config, vision, mesh, output_std=output_std)
        self.selective = vision.recompute == "selective"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = (self.layer_norm1, self.self_attn), (self.layer_norm2, self.mlp)
        return residual(x, *halves, selective=self.selective)


class VisionBlocks(nn.Module):
    """All layers; those up to the features are computed, the others are not trained."""

    def __init__(self, config: ModelConfig, vision: VisionConfig, mesh: ParallelMesh):
        super().__init__()
        self.used = vision.used_layers
        self.again = vision.recompute == "full"
        self.layers = nn.ModuleList(VisionBlock(config, vision, mesh) for _ in range(vision.num_layers))
        self.layers[self.used :].requires_grad_(False)
        self.compiled = CompiledBlocks(self.layers, budget=config.recompute_budget) if config.compile else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.compiled is not None:
            self.compiled.expect(x)
        for layer in itertools.islice(self.layers, self.used):
            x = computed_again(layer, x) if self.again else layer(x)
        return x


class AttentionPooling(nn.Module):
    """SigLIP's pooling head: a learned query attends to all patches, and a feed-forward layer follows."""

    def __init__(self, config: ModelConfig, vision: VisionConfig, mesh: ParallelMesh):
        super().__init__()
        width, std, dtype = vision.hidden_size, config.init_std, config.torch_dtype
        self.probe = new_parameter(ParameterLayout((1, 1, width), std=std), mesh, dtype)
        self.attention = nn.MultiheadAttention(width, vision.num_heads, batch_first=True)
        self.attention.reads_children = True  # type: ignore[assignment]
        adopt_norm(self.attention, config, mesh, sum_over=(), std=std)
        self.layernorm = layer_norm(config, vision, mesh)
        self.mlp = VisionFeedForward(config, vision, mesh, output_std=std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pool ``[n, patches, hidden]`` -> ``[n, hidden]``."""
        pooled = self.attention(self.probe.expand(len(x), -1, -1), x, x, need_weights=False)[0]
        return (pooled + self.mlp(self.layernorm(pooled)))[:, 0]


class VisionTransformer(nn.Module):
    """Image encoder of ``model.vision``.

    Args:
        config: the model's shape; ``vision``, ``image_size`` and ``patch_size`` are used.
        mesh: the ranks of the model.

    Raises:
        TopologyError: a dimension is not divisible by ``mesh.tp``.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, config: ModelConfig, mesh: ParallelMesh):
        super().__init__()
        assert config.vision is not None
        self.vision = vision = config.vision
        ranks = encoder_mesh(vision, mesh)
        for name, values in (("mean", vision.image_mean), ("std", vision.image_std)):
            evened = torch.tensor(values, dtype=config.torch_dtype, device=mesh.device)[:, None, None]
            self.register_buffer(name, evened, persistent=False)
        self.embeddings = VisionEmbeddings(config, vision, ranks)
        # CLIP's checkpoints misspell the name in this way.
        self.pre_layrnorm = layer_norm(config, vision, ranks) if vision.kind == "clip" else None
        self.encoder = VisionBlocks(config, vision, ranks)
        self.post_layernorm = layer_norm(config, vision, ranks)
        self.head = AttentionPooling(config, vision, ranks) if vision.head else None
        if vision.tp is not None:
            _whole(self)
        if vision.feature_layer is not None:
            self.post_layernorm.requires_grad_(False)
        if self.head is not None and vision.pooling != "attention":
            self.head.requires_grad_(False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Encode images ``[n, 3, height, width]`` in [0, 1] of any size -> ``[n, patches or 1, hidden]``."""
        vision = self.vision
        x = self.embeddings((image.to(self.mean.dtype) - self.mean) / self.std)
        if self.pre_layrnorm is not None:
            x = self.pre_layrnorm(x)
        x = self.encoder(x)
        if vision.feature_layer is None:
            x = self.post_layernorm(x)
        if vision.kind == "clip":
            x = x[:, 1:]
        if self.head is not None and vision.pooling == "attention":
            return self.head(x)[:, None]
        return x.mean(dim=1, keepdim=True) if vision.pooling == "mean" else x


class Projector(nn.Module):
    """Map from the encoder's width to the language model's: ``linear_2(gelu(linear_1(x)))``, or ``linear_1``."""

    def __init__(self, config: ModelConfig, mesh: ParallelMesh):
        super().__init__()
        assert config.vision is not None
        ranks = encoder_mesh(config.vision, mesh)
        width = config.vision.hidden_size
        hidden = config.hidden_size
        two, dtype = config.vision.projector == "mlp", config.torch_dtype
        first = ColumnParallelLinear(
            width, hidden, ranks, bias=True, gather_output=not two, std=width**-0.5, dtype=dtype
        )
        self.linear_1 = first
        self.linear_2 = None
        if two:
            self.linear_2 = RowParallelLinear(hidden, hidden, ranks, bias=True, std=config.init_std, dtype=dtype)
        if config.vision.tp is not None:
            _whole(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear_1(x)
        return x if self.linear_2 is None else self.linear_2(F.gelu(x))


def make_vision(config: ModelConfig, mesh: ParallelMesh) -> nn.Module | None:
    """Make a model's encoder: images ``[n, 3, height, width]`` -> ``[n, tokens, width]``; None for none."""
    if not config.image_size:
        return None
    return PatchEmbedding(config, mesh) if config.vision is None else VisionTransformer(config, mesh)


class PatchEmbedding(nn.Module):
    """Linear embedding of image patches, plus a learned vector for each position.

    It is small, so every rank has all of it.

    Args:
        config: the model's shape; ``image_size`` and ``patch_size`` are used.
        mesh: the ranks.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh):
        super().__init__()
        self.patch_size = config.patch_size
        self.image_size = config.image_size
        pixels = 3 * config.patch_size**2
        hidden = config.hidden_size
        # Pixels, unlike hidden states, do not have zero mean and unit variance; 1/sqrt(inputs) compensates for that.
        projection = ParameterLayout((hidden, pixels), std=pixels**-0.5)
        self.weight = new_parameter(projection, mesh, config.torch_dtype)
        self.bias = new_parameter(ParameterLayout((hidden,)), mesh, config.torch_dtype)
        positions = ParameterLayout((config.prefix_length, hidden), std=config.init_std)
        self.position = new_parameter(positions, mesh, config.torch_dtype)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Embed ``[n, 3, height, width]`` in [0, 1] -> ``[n, prefix, hidden]``, patches row by row.

        Raises:
            UsageError: the images have another size than that of the model.
        """
        if tuple(image.shape[-2:]) != (self.image_size, self.image_size):
            what = f"images of {image.shape[-2]} x {image.shape[-1]} pixels in a model of {self.image_size}"
            raise UsageError(what, fix="bring them to size, or set model.vision: its positions fit any size")
        patches = F.pixel_unshuffle(image.to(self.weight.dtype) - 0.5, self.patch_size).flatten(2).transpose(1, 2)
        return F.linear(patches, self.weight, self.bias) + self.position


#: Images of a micro-batch -> the tokens of all of them, concatenated, and the number of tokens of each.
Exchange = Callable[[torch.Tensor], tuple[torch.Tensor, list[int]]]


def encode_images(
    images: Sequence[torch.Tensor], encoder: nn.Module, projector: nn.Module | None
) -> tuple[torch.Tensor, list[int]]:
    """Encode images of any sizes, those of one size together.

    Args:
        images: at least one image, ``[3, height, width]`` each.
        encoder: result of :func:`make_vision`.
        projector: map from the encoder's width to that of the text.

    Returns:
        The tokens of all images, concatenated, ``[tokens, hidden]``; and the number of tokens of each.
    """
    by_size: dict[torch.Size, list[int]] = {}
    for number, image in enumerate(images):
        by_size.setdefault(image.shape, []).append(number)
    made: dict[int, torch.Tensor] = {}
    for numbers in by_size.values():
        tokens = encoder(torch.stack([images[number] for number in numbers]))
        made |= zip(numbers, (tokens if projector is None else projector(tokens)).unbind(), strict=True)
    return torch.cat([made[number] for number in range(len(images))]), [len(made[n]) for n in range(len(images))]


def place_tokens(
    text: torch.Tensor, tokens: torch.Tensor, counts: list[int], rows: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Insert image tokens at their placeholders; a row may have any number of images.

    Args:
        text: ``[rows, length, hidden]``
        tokens: tokens of all images, ``[tokens, hidden]``.
        counts: number of tokens of each image.
        rows, starts: see :class:`MultimodalBatch`.

    Returns:
        ``[rows, length, hidden]``
    """
    each = on_device(counts, text.device)
    numbers = torch.arange(len(counts), device=text.device)
    number = torch.repeat_interleave(numbers, each, output_size=sum(counts))
    inside = torch.arange(len(number), device=text.device) - (each.cumsum(0) - each)[number]
    return text.index_put((rows[number], starts[number] + inside), tokens)
