"""The table of architectures that are exported and compared with their exports, and of what cannot be exported."""

from __future__ import annotations

import torch

from tests.lowering import architectures_mixed as mixed
from tests.lowering import architectures_plain as plain
from tests.lowering.architecture import Architecture
from tests.lowering.architectures_perception import PERCEPTION
from tests.lowering.architectures_plain import IMAGE, SEQUENCE, SIGNAL, TOKENS
from tests.lowering.architectures_transformers import LANGUAGE
from tests.lowering.vision_models import RecurrentClassifier, SmallResNet, SmallSqueezeNet, SmallUNet

KEEP = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
EDGES = torch.tensor([[0, 1, 2, 3, 4, 4, 0, 2], [1, 2, 3, 4, 0, 1, 3, 0]])
NODES = SEQUENCE.flatten(0, 1)[:5]
ADJACENCY = (torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(4)) > 0.5).float() + torch.eye(6)
VOLUME = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(5))

CONVOLUTIONAL = (
    Architecture("unet", SmallUNet, (IMAGE,)),
    Architecture("residual", SmallResNet, (IMAGE,), opset=21, axes=(0,)),
    Architecture("squeezenet", SmallSqueezeNet, (IMAGE,), opset=22),
    Architecture("tcn", plain.tcn, (SIGNAL,), opset=20, axes=(0,)),
    Architecture("wavenet", plain.WaveNet, (SIGNAL,), axes=(0,)),
    Architecture("separable", plain.separable, (IMAGE,), opset=23, axes=(0,)),
    Architecture("grouped", plain.grouped, (IMAGE,), opset=22, axes=(0,)),
    Architecture("densenet", plain.DenseNet, (IMAGE,), axes=(0,)),
    Architecture("autoencoder", plain.Autoencoder, (IMAGE,), opset=20, axes=(0,)),
    Architecture("super_resolution", plain.super_resolution, (IMAGE,), axes=(0,)),
    Architecture("volume", mixed.Volume, (VOLUME,), opset=21, axes=(0,)),
    Architecture("gated_convolution", mixed.GatedConvolution, (SIGNAL,), opset=22),
    Architecture("pyramid", mixed.pyramid, (IMAGE,), axes=(0,)),
    Architecture("locally_connected", mixed.LocallyConnected, (IMAGE,)),
    Architecture("spatial_transformer", mixed.SpatialTransformer, (IMAGE,), opset=20, axes=(0,)),
    Architecture("dueling", mixed.DuelingRainbow, (IMAGE,), opset=23, axes=(0,)),
)
RECURRENT = (
    Architecture("lstm", lambda: plain.Sampled("LSTM"), (SEQUENCE,)),
    Architecture("gru", lambda: plain.Sampled("GRU"), (SEQUENCE,), opset=22),
    Architecture("bidirectional_lstm", lambda: RecurrentClassifier("LSTM"), (TOKENS,), opset=21),
    Architecture("bidirectional_gru", lambda: RecurrentClassifier("GRU"), (TOKENS,)),
    Architecture("cells", plain.CellLoop, (SEQUENCE,), opset=20, axes=(0,)),
    Architecture("forecast", mixed.ResidualForecast, (SIGNAL,), axes=(0,)),
    Architecture("ordinary_differential", mixed.OrdinaryDifferential, (SEQUENCE,), opset=23, axes=(0,)),
)
ATTENTIVE = (
    Architecture("scaled_attention", plain.ScaledAttention, (SEQUENCE, KEEP), axes=(0,)),
    Architecture("scaled_attention_23", plain.ScaledAttention, (SEQUENCE, KEEP), opset=23, axes=(0,)),
    Architecture("cross_attention", plain.CrossAttention, (SEQUENCE, SEQUENCE[..., :6], SEQUENCE[..., :5], ~KEEP)),
    Architecture("transformer_encoder", plain.transformer_encoder, (SEQUENCE,), opset=20),
    Architecture("transformer", plain.Translator, (SEQUENCE, SEQUENCE[:, :4]), opset=23),
    Architecture("root_mean_square", plain.RootMeanSquare, (SEQUENCE,), opset=23, axes=(0,)),
    Architecture("set_transformer", mixed.SetTransformer, (SEQUENCE,), opset=22),
    Architecture("relative_windows", mixed.RelativeAttention, (IMAGE,), axes=(0,)),
    Architecture("mixer", plain.Mixer, (IMAGE,), axes=(0,)),
    Architecture("linear_attention", mixed.LinearAttention, (SEQUENCE,), opset=22, axes=(0,)),
    Architecture("sparsemax", mixed.Sparsemax, (SEQUENCE,), axes=(0,)),
    Architecture("experts", mixed.Experts, (SEQUENCE,), opset=21, axes=(0,)),
)
OTHERS = (
    Architecture("variational", plain.VariationalAutoencoder, (SEQUENCE, SEQUENCE[..., :3]), axes=(0,)),
    Architecture("pooled_embedding", lambda: plain.PooledEmbedding(False), (TOKENS,), axes=(0, 1)),
    Architecture("embedding_bag", lambda: plain.PooledEmbedding(True), (TOKENS,), opset=20),
    Architecture("siamese", plain.Siamese, (SEQUENCE, SEQUENCE.flip(0)), axes=(0,)),
    Architecture("tied_autoencoder", plain.TiedAutoencoder, (TOKENS,), opset=22, axes=(0, 1)),
    Architecture("graph_net", plain.GraphNet, (NODES, EDGES)),
    Architecture("graph_convolution", plain.GraphConvolution, (SEQUENCE, ADJACENCY), opset=20, axes=(0,)),
    Architecture("fourier_features", mixed.FourierFeatures, (SEQUENCE,), axes=(0,)),
    Architecture("spectral_mixing", mixed.SpectralMixing, (SEQUENCE,), opset=20),
    Architecture("einsum", mixed.Einsum, (SEQUENCE,), axes=(0,)),
    Architecture("coupling_flow", mixed.CouplingFlow, (SEQUENCE,), opset=21, axes=(0,)),
    Architecture("state_space", mixed.StateSpace, (SIGNAL,), axes=(0,)),
    Architecture("recommender", mixed.Recommender, (SEQUENCE[:, 0], TOKENS[:, :3]), opset=21, axes=(0,)),
    Architecture("parametrized", mixed.Parametrized, (SEQUENCE,), opset=20),
    Architecture("bilinear", mixed.Bilinear, (SEQUENCE, SEQUENCE.flip(1)), axes=(0,)),
)
ARCHITECTURES = (*CONVOLUTIONAL, *RECURRENT, *ATTENTIVE, *OTHERS, *LANGUAGE, *PERCEPTION)

REFUSED = {
    "XLNet (transformers)": "the exporter finds no overload of aten.sub for `1.0 - mask` of two Python numbers",
    "T5, Swin, BEiT with fused attention": "the exporter cannot view its own decomposition of the fused attention "
    "when the batch is open; they are exported with the plain attention",
    "Funnel": "the exporter computes the relative positions' product with `r_kernel` at export and stores the result: "
    "the weight is lost",
    "Mamba, RWKV with an open length": "their Python loops fix the length at export; the batch stays open",
    "Mixtral with grouped matrix products": "transformers.grouped_mm_fallback has no translation; the experts are "
    "exported as batched products",
    "a module attribute named like a value of the traced forward (`self.code`, `code = ...`)": "the exporter loses "
    "the attribute, or writes a graph in which a buffer and a node have one name",
    "nn.Transformer that has to find out whether its mask is causal": "the check depends on the data; "
    "`tgt_is_causal=True` is passed",
}
"""What torch's exporter itself does not export -> why, and how the table above goes round it where it does."""
