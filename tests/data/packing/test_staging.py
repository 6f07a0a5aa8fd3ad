"""Packing that fails or is interrupted leaves no shard."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from onward.data import DataLoader
from onward.data.packing import PackOptions, pack
from onward.data.packing import packer as packer_module
from onward.errors import DataError, StorageError
from tests.data.packing.archives import QUIET, save


def test_an_error_leaves_the_destination_as_it_was(tmp_path, monkeypatch):
    save(tmp_path / "a.npz")
    out = tmp_path / "deep" / "out"

    class Refused(packer_module.ShardWriter):
        def publish(self):
            raise StorageError("the disk is full")

    monkeypatch.setattr(packer_module, "ShardWriter", Refused)
    with pytest.raises(StorageError, match="the disk is full"):
        pack(tmp_path / "a.npz", out, PackOptions(samples_per_file=3, **QUIET))
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupting_leaves_no_shard_that_a_loader_would_read(tmp_path, how):
    np.save(tmp_path / "x.npy", np.zeros((40, 100)))
    out = tmp_path / "out"
    arguments = f"{str(tmp_path / 'x.npy')!r}, {str(out)!r}, PackOptions(progress=False, samples_per_file=10)"
    # It packs two shards and waits there, however long the signal takes.
    code = (
        "import time\nfrom onward.data.packing import PackOptions, pack, packer\n"
        "class Writer(packer.ShardWriter):\n"
        "    def write(self, sample):\n"
        "        super().write(sample)\n"
        "        if self.path.name == 'shard-000002.pb' and self.sample_count == 3: time.sleep(600)\n"
        f"packer.ShardWriter = Writer\npack({arguments})"
    )
    # A suite that runs in the background hands down an ignored SIGINT, which Python would then ignore too.
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    end = time.monotonic() + 120
    while not list(out.glob(".packing.onward-tmp-*/shard-000001.pb")) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(how)
    process.communicate(timeout=120)
    assert process.returncode != 0
    if how == signal.SIGINT:
        assert not out.exists()
        return
    with pytest.raises(DataError, match=r"holds no \.pb files"):
        DataLoader({}, out)
    assert list(out.glob(".packing.onward-tmp-*"))
    pack(save(tmp_path / "a.npz"), out, PackOptions(**QUIET))
    assert sorted(os.listdir(out)) == ["pack.json", "shard-000000.pb"]
