"""Small convolutional and recurrent networks in plain torch, to be exported and compared."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalization and a shortcut, as in ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.plain = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.plain else self.downsample(x)))


class SmallResNet(nn.Module):
    """ResNet's stem, two blocks and head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.block1 = ResidualBlock(8, 12, 1)
        self.block2 = ResidualBlock(12, 16, 2)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.block2(self.block1(self.stem(x))), 1)
        return self.fc(torch.flatten(x, 1))


class Fire(nn.Module):
    """SqueezeNet's block: squeeze, then two expansions side by side."""

    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.expand1 = nn.Conv2d(squeeze, expand, 1)
        self.expand3 = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.expand1(x)), F.relu(self.expand3(x))], 1)


class SmallSqueezeNet(nn.Module):
    """SqueezeNet with two fire blocks; its pools round up."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Fire(8, 4, 8),
            Fire(16, 4, 8),
            nn.MaxPool2d(3, 2, ceil_mode=True),
        )
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Conv2d(16, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(self.classifier(self.features(x)), 1)


class Rise(nn.Module):
    """One step up in a U-Net, with group normalization."""

    def __init__(self, inputs: int, outputs: int, up: nn.Module) -> None:
        super().__init__()
        self.up = up
        self.conv = nn.Sequential(
            nn.Conv2d(inputs + outputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU()
        )

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        return self.conv(torch.cat([self.up(x), beside], 1))


class SmallUNet(nn.Module):
    """Three steps down, three up: by a transposed convolution, bilinearly, by repetition."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), nn.ReLU())
        self.down1 = nn.Conv2d(4, 6, 3, 2, 1)
        self.down2 = nn.Conv2d(6, 8, 3, 2, 1)
        self.down3 = nn.Conv2d(8, 10, 3, 2, 1)
        self.up3 = Rise(10, 8, nn.ConvTranspose2d(10, 10, 2, 2))
        self.up2 = Rise(8, 6, nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True))
        self.up1 = Rise(6, 4, nn.Upsample(scale_factor=2, mode="nearest"))
        self.leave = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.enter(x)
        second = F.relu(self.down1(first))
        third = F.relu(self.down2(second))
        lowest = F.relu(self.down3(third))
        return self.leave(self.up1(self.up2(self.up3(lowest, third), second), first))


class RecurrentClassifier(nn.Module):
    """Embedding, a bidirectional recurrent net of two layers, mean over time, head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.recurrent = getattr(nn, kind)(6, 7, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(14, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0].mean(1))


def randomize(module: nn.Module) -> nn.Module:
    """Other values in every parameter and statistic: the exporter merges initializers that are equal."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            shift = 0.8 if parameter.dim() == 1 else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + shift)
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return module
