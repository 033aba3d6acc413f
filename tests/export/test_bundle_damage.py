"""An altered bundle is refused with the file's name before a byte of it runs."""

import errno
import fcntl
import json
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bundle_files import record_of, rewrite_manifest, small_bundle, text_of_manifest
from campaign_bundle import WAYS, campaign
from flax import nnx

import argosy
from argosy.cli import main
from argosy.core.errors import ArgosyError, BadInput, Busy, Damaged, Unsupported
from argosy.export import bundle as bundles
from argosy.export.bundle import Bundle
from argosy.export.manifest import MANIFEST, SEAL
from argosy.export.refresh import refresh_bundle
from argosy.export.verify import days_left, read_bundle_manifest, verify_bundle


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return small_bundle(tmp_path_factory.mktemp("whole") / "b")


@pytest.fixture
def bundle(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "b"))


def test_weights_that_are_loaded_are_copies(tmp_path):
    """Also where the tensor lies so in its file that a CPU could use the mapping itself: names move it by their length."""

    class Scaled(nnx.Module):
        def __init__(self, name: str):
            self.name = name
            setattr(self, name, nnx.Param(jnp.full((16, 16), 2.0)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ getattr(self, self.name)[...]

    aligned = 0
    for length in range(1, 70, 8):
        folder = tmp_path / str(length)
        argosy.export(Scaled("w" * length), (jnp.zeros((1, 16)),), folder, platforms=["cpu"])
        file = weights_of(folder)
        with file.open("r+b") as stream:
            start = 8 + struct.unpack("<Q", stream.read(8))[0]
            opened = Bundle.open(folder)
            opened.load()
            stream.seek(start)
            stream.write(b"\0" * 1024)
        aligned += start % 64 == 0
        (name,) = (spec.name for spec in opened.manifest.signature().inputs)
        (y,) = opened.run({name: np.ones((1, 16), np.float32)}).values()
        np.testing.assert_array_equal(y, 32)
    assert aligned


def weights_of(bundle: Path) -> Path:
    return next((bundle / "weights").iterdir())


def program_of_bundle(bundle: Path) -> Path:
    return next((bundle / "programs").iterdir())


@pytest.fixture
def unread(monkeypatch):
    """Nothing may be deserialized or mapped."""

    def never(*_: object) -> None:
        raise AssertionError("a byte of an altered bundle was read")

    monkeypatch.setattr(bundles.export, "deserialize", never)
    monkeypatch.setattr(bundles, "open_bundle_weights", never)


def test_it_runs_as_it_is(bundle):
    x, gain = np.ones((2, 3), np.float32), np.ones(2, np.float32)
    assert Bundle.open(bundle).run({"x": x, "gain": gain})["scores"].shape == (2, 400)


def test_a_manifest_has_the_form_of_the_guide(bundle):
    content = json.loads((bundle / MANIFEST).read_text())
    del content["sha256"]
    assert text_of_manifest(content) == (bundle / MANIFEST).read_text()
    assert content["files"] == {
        str(path.relative_to(bundle)): record_of(path) for path in bundle.rglob("*") if path.is_file() and path.name != MANIFEST
    }


def test_damage_of_every_file_is_found(whole, tmp_path, unread):
    """A share of the campaign: each way, at each file."""
    kinds, through = campaign(whole, tmp_path, n=90, seed=3)
    assert not through
    assert len(kinds) == 3
    assert all(set(ways) == {way.__name__ for way in WAYS} for ways in kinds.values())


@pytest.mark.parametrize("which", [weights_of, program_of_bundle])
def test_a_missing_or_changed_file_is_named(which, bundle, unread):
    path = which(bundle)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match=f"{re.escape(str(path.relative_to(bundle)))} differs"):
        Bundle.open(bundle)
    path.unlink()
    with pytest.raises(Damaged, match=f"{re.escape(str(path.relative_to(bundle)))} is missing"):
        Bundle.open(bundle)


@pytest.mark.parametrize("name", ["extra.bin", "weights/other.safetensors", ".hidden", "tokenizer/tokenizer.json", "new/"])
def test_a_file_that_does_not_belong_is_named(name, bundle, unread):
    path = bundle / name
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if name.endswith("/") else path.write_bytes(b"x")
    with pytest.raises(Damaged, match=f"{re.escape(name.partition('/')[0])}.* does not belong to the bundle"):
        Bundle.open(bundle)


@pytest.mark.parametrize("which", [weights_of, program_of_bundle, lambda bundle: bundle / MANIFEST, lambda bundle: bundle / "weights"])
def test_a_symbolic_link_is_refused(which, bundle, tmp_path, unread):
    path = which(bundle)
    target = tmp_path / "moved"
    path.rename(target)
    path.symlink_to(target)
    with pytest.raises(Damaged, match=f"{re.escape(str(path.relative_to(bundle)))} is a symbolic link"):
        Bundle.open(bundle)


def test_a_pipe_is_refused_without_waiting_for_it(bundle, unread):
    path = program_of_bundle(bundle)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Damaged, match=r"programs/call\.bin is no plain file"):
        Bundle.open(bundle)


OUTSIDE = ["../outside.bin", "/etc/hostname", "programs/../../outside.bin", "programs//x.bin", "..", "a\\..\\b", "", "programs/./x"]


@pytest.mark.parametrize("name", [*OUTSIDE, MANIFEST])
def test_a_path_outside_the_bundle_is_refused(name, bundle, tmp_path, unread):
    (tmp_path / "outside.bin").write_bytes(program_of_bundle(bundle).read_bytes())
    record = record_of(tmp_path / "outside.bin")

    def edit(content):
        content["files"][name] = record
        content["signatures"]["call"]["programs"][0]["file"] = name

    rewrite_manifest(bundle, edit)
    with pytest.raises(Damaged, match=re.escape(f"`{name}` ")):
        Bundle.open(bundle)


def test_swapped_weights_are_refused(bundle, tmp_path, unread):
    """Weights of another bundle under the name of these, with a manifest that agrees."""
    mine = weights_of(bundle)
    data = bytearray(mine.read_bytes())
    data[-1] ^= 1
    mine.write_bytes(data)
    rewrite_manifest(bundle, lambda content: content["files"].update({f"weights/{mine.name}": record_of(mine)}))
    with pytest.raises(Damaged, match=f"`weights/{mine.name}` is not named by its contents"):
        Bundle.open(bundle)


def renamed_weights(bundle: Path, data: bytes) -> str:
    """Puts other bytes in the place of the weights, with a manifest that agrees in every hash. Returns their name."""
    old = weights_of(bundle)
    old.write_bytes(data)
    record = record_of(old)
    new = old.rename(old.with_name(f"{record['sha256']}.safetensors"))

    def edit(content):
        del content["files"][f"weights/{old.name}"]
        content["files"][f"weights/{new.name}"] = record
        content["weights"][0]["file"] = f"weights/{new.name}"

    rewrite_manifest(bundle, edit)
    return new.name


@pytest.mark.parametrize("length", [10 << 30, 2**64 - 1, 200_000_000])
def test_a_giant_header_is_refused(length, bundle):
    name = renamed_weights(bundle, struct.pack("<Q", length) + weights_of(bundle).read_bytes()[8:])
    with pytest.raises(Damaged, match=f"a header of {length} bytes") as error:
        Bundle.open(bundle)
    assert name in str(error.value)


def test_a_header_that_is_not_the_manifest_s_is_refused(bundle):
    data = weights_of(bundle).read_bytes()
    renamed_weights(bundle, data.replace(b"[3,400]", b"[400,3]"))
    with pytest.raises(Damaged, match=r"tensor `constant\.0` is not that of the manifest"):
        Bundle.open(bundle)


def test_a_program_with_other_shapes_is_refused(bundle):
    """A program that is whole, of another signature, with a manifest that agrees in every hash."""

    def edit(content):
        content["signatures"]["call"]["inputs"][0]["shape"] = ["batch", 4]

    rewrite_manifest(bundle, edit)
    with pytest.raises(Damaged, match=r"programs/call\.bin does not have the shapes and types of its signature"):
        Bundle.open(bundle).run({"x": np.ones((2, 4), np.float32), "gain": np.ones(2, np.float32)})


def test_a_program_that_is_altered_after_opening_is_not_read(bundle, monkeypatch):
    opened = Bundle.open(bundle)
    path = bundle / "programs" / "call.bin"
    path.write_bytes(path.read_bytes() + b"x")
    monkeypatch.setattr(bundles.export, "deserialize", None)
    with pytest.raises(Damaged, match=r"programs/call\.bin was altered after the bundle was opened"):
        opened.run({"x": np.ones((2, 3), np.float32), "gain": np.ones(2, np.float32)})


@pytest.mark.parametrize("size", [0, None])
def test_weights_that_are_altered_after_opening_are_not_read(size, bundle):
    """A shorter file would end the process with SIGBUS."""
    opened = Bundle.open(bundle)
    file = weights_of(bundle)
    os.utime(file)  # which alters nothing
    assert opened.weight(next(iter(opened.manifest.weights[0].tensors))).size
    file.write_bytes(bytes(file.stat().st_size if size is None else size))
    with pytest.raises(Damaged, match="was altered after the bundle was opened"):
        opened.run({"x": np.ones((2, 3), np.float32), "gain": np.ones(2, np.float32)})


def test_a_manifest_that_is_too_large_is_not_read(bundle, monkeypatch):
    monkeypatch.setattr("argosy.export.verify.MOST_MANIFEST_BYTES", 100)
    with pytest.raises(Damaged, match=r"manifest\.json has \d+ bytes, over the limit of 100"):
        Bundle.open(bundle)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b"\xff", b'{"format": 1}', b"[" * 100_000, b'{"format": "1"}', b"null", b'{"format": NaN}']
)
def test_a_manifest_that_is_none_is_refused(text, bundle, unread):
    (bundle / MANIFEST).write_bytes(text)
    with pytest.raises(Damaged, match=r"manifest\.json"):
        Bundle.open(bundle)


@pytest.mark.parametrize(
    "edit",
    [
        lambda c: c.update(extra=1),
        lambda c: c["files"].update({"programs/call.bin": {"bytes": -1, "sha256": "0" * 64}}),
        lambda c: c["files"].update({"programs/call.bin": {"bytes": 1, "sha256": "../" * 21 + "x"}}),
        lambda c: c.update(default="gone"),
        lambda c: c["signatures"]["call"]["weights"].append("gone"),
        lambda c: c["signatures"]["call"]["programs"].append({"file": "programs/gone.bin", "platforms": ["cpu"], "shapes": {}}),
        lambda c: c["signatures"]["call"]["inputs"][0].update(dtype=3),
        lambda c: c["signatures"]["call"]["inputs"][0].update(dtype="object"),
        lambda c: c["signatures"]["call"]["outputs"][0].update(dtype="finfo"),
        lambda c: c["signatures"]["call"]["preprocess"].append({"step": "exec", "code": "1"}),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(edit, bundle, unread):
    rewrite_manifest(bundle, edit)
    with pytest.raises(Damaged):
        Bundle.open(bundle)


def test_another_format_is_named_before_anything_else(bundle, unread):
    rewrite_manifest(bundle, lambda content: content.update(format=2, signatures={"other": "layout"}))
    with pytest.raises(Unsupported, match=r"manifest\.json has format 2, and this version of argosy reads format 1"):
        Bundle.open(bundle)


def test_no_bundle_is_said(tmp_path):
    with pytest.raises(BadInput, match="no bundle at"):
        Bundle.open(tmp_path / "gone")
    with pytest.raises(BadInput, match=r"is no bundle: it has no manifest\.json"):
        Bundle.open(tmp_path)


def test_another_platform_is_named(tmp_path):
    small_bundle(tmp_path / "b", platforms=["tpu", "cuda"])
    with pytest.raises(Unsupported, match="has programs for tpu, cuda, and this process runs on cpu") as error:
        Bundle.open(tmp_path / "b")
    assert "platforms=tpu,cuda,cpu" in str(error.value)
    verify_bundle(tmp_path / "b")


# ---------------------------------------------------------------- the window of jax


def age_bundle(bundle: Path, days: int, jax_version: str) -> None:
    """As if it had been written so many days ago by another version of jax."""
    written_at = datetime.now(UTC) - timedelta(days=days)

    def edit(content):
        content["written"] = written_at.isoformat(timespec="seconds")
        content["readable_until"] = (written_at + timedelta(days=180)).date().isoformat()
        content["versions"]["jax"] = jax_version

    rewrite_manifest(bundle, edit)


def test_the_window_is_six_months(bundle):
    manifest = read_bundle_manifest(bundle)
    written_at = datetime.fromisoformat(manifest.written)
    assert (datetime.fromisoformat(manifest.readable_until).date() - written_at.date()).days == 180
    assert days_left(manifest) in (179, 180)


def test_an_expired_bundle_says_what_to_do(bundle, monkeypatch):
    age_bundle(bundle, 200, "0.9.0")
    with pytest.raises(Unsupported, match=r"its programs are from jax 0\.9\.0") as error:
        Bundle.open(bundle)
    assert "argosy bundle refresh" in str(error.value)
    assert "with jax 0.9.0" in str(error.value)
    assert Bundle.open(bundle, expired=True)


def test_the_version_that_wrote_it_reads_it_for_ever(bundle):
    age_bundle(bundle, 2000, jax.__version__)
    messages: list[str] = []
    assert Bundle.open(bundle, say=messages.append)
    assert not messages


def test_programs_of_a_newer_jax_say_which(bundle):
    """jax 0.11.2 writes StableHLO 1.18.0, and 0.10.2 reads 1.17.0 at most."""
    rewrite_manifest(bundle, lambda content: content["versions"].update(stablehlo="99.1.0", jax="9.9.9"))
    with pytest.raises(Unsupported, match=r"its programs are StableHLO 99\.1\.0") as error:
        Bundle.open(bundle)
    assert "jax 9.9.9" in str(error.value)
    rewrite_manifest(bundle, lambda content: content["versions"].update(stablehlo="unknown"))
    assert Bundle.open(bundle)


def test_the_last_month_warns(bundle):
    messages: list[str] = []
    age_bundle(bundle, 140, "0.9.0")
    Bundle.open(bundle, say=messages.append)
    assert not messages
    age_bundle(bundle, 170, "0.9.0")
    Bundle.open(bundle, say=messages.append)
    assert "argosy bundle refresh" in messages[0]
    assert "10 days" in messages[0] or "9 days" in messages[0]


# ---------------------------------------------------------------- signatures


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two pairs of ed25519 keys, made by openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make keys with")
    folder = tmp_path_factory.mktemp("keys")
    for name in ("mine", "other"):
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", folder / f"{name}.pem"], check=True, capture_output=True)
        words = ["openssl", "pkey", "-in", folder / f"{name}.pem", "-pubout", "-out", folder / f"{name}.pub"]
        subprocess.run(words, check=True, capture_output=True)
    subprocess.run(["openssl", "genrsa", "-out", folder / "rsa.pem", "2048"], check=True, capture_output=True)
    return folder


@pytest.fixture
def signed_bundle(keys, tmp_path):
    return small_bundle(tmp_path / "signed", sign=keys / "mine.pem")


def test_a_signature_is_checked_and_openssl_agrees(signed_bundle, keys):
    assert verify_bundle(signed_bundle, keys / "mine.pub")
    words = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", keys / "mine.pub", "-rawin", "-in", signed_bundle / MANIFEST]
    done = subprocess.run([*words, "-sigfile", signed_bundle / SEAL], capture_output=True, text=True)
    assert "Verified Successfully" in done.stdout
    with pytest.raises(Damaged, match=r"manifest\.sig is no signature of manifest\.json by .*other\.pub"):
        Bundle.open(signed_bundle, key=keys / "other.pub")


def test_what_was_signed_cannot_be_changed(signed_bundle, keys, unread):
    rewrite_manifest(signed_bundle, lambda content: content["lineage"].update(model="another"))
    assert verify_bundle(signed_bundle)
    with pytest.raises(Damaged, match="is no signature"):
        Bundle.open(signed_bundle, key=keys / "mine.pub")
    (signed_bundle / SEAL).write_bytes(bytes(64))
    with pytest.raises(Damaged, match="is no signature"):
        Bundle.open(signed_bundle, key=keys / "mine.pub")
    (signed_bundle / SEAL).unlink()
    with pytest.raises(Damaged, match=r"it is not signed: there is no manifest\.sig"):
        Bundle.open(signed_bundle, key=keys / "mine.pub")


def test_a_renewed_bundle_is_signed_anew(signed_bundle, keys, tmp_path, capsys):
    with pytest.raises(Damaged, match="is no signature"):
        refresh_bundle(signed_bundle, tmp_path / "new", key=keys / "other.pub")
    refresh_bundle(signed_bundle, tmp_path / "new", key=keys / "mine.pub", sign=keys / "other.pem")
    assert verify_bundle(tmp_path / "new", keys / "other.pub")
    assert main(["bundle", "refresh", str(signed_bundle)]) == 0
    assert "was signed" in capsys.readouterr().err
    with pytest.raises(Damaged, match="it is not signed"):
        verify_bundle(signed_bundle, keys / "mine.pub")


def test_damage_of_a_signed_bundle_is_found_with_the_key(signed_bundle, keys, tmp_path, unread):
    kinds, through = campaign(signed_bundle, tmp_path / "campaign", n=60, seed=4, key=str(keys / "mine.pub"))
    assert not through
    assert set(kinds[SEAL]) == {way.__name__ for way in WAYS}


def test_a_key_that_is_none_is_refused(signed_bundle, keys, tmp_path):
    for name in ("rsa.pem", "gone.pem", "mine.pub"):
        with pytest.raises(BadInput, match=re.escape(name)):
            small_bundle(tmp_path / "b", sign=keys / name)
        assert not (tmp_path / "b").exists()
    for name in ("mine.pem", "gone.pub"):
        with pytest.raises(BadInput, match=re.escape(name)):
            verify_bundle(signed_bundle, keys / name)


def test_without_the_package_a_signature_is_refused_by_its_name(keys, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    with pytest.raises(Unsupported, match="need the package `cryptography`"):
        small_bundle(tmp_path / "b", sign=keys / "mine.pem")


# ---------------------------------------------------------------- writing


def test_nothing_is_left_of_a_write_that_fails(tmp_path, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("argosy.weights.staging.StagedFolder.commit", broken)
    with pytest.raises((ArgosyError, OSError)):
        small_bundle(tmp_path / "b")
    assert not list(tmp_path.iterdir())


def test_a_bundle_is_never_overwritten(bundle):
    before = (bundle / MANIFEST).read_bytes()
    with pytest.raises(BadInput, match="is not empty"):
        small_bundle(bundle)
    assert (bundle / MANIFEST).read_bytes() == before


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """As a process that is writing there."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def test_what_a_killed_export_left_is_replaced_and_nothing_else(whole, tmp_path):
    part = tmp_path / "b.part"
    part.mkdir()
    (part / "weights").mkdir()
    (part / "weights" / "0.safetensors").write_bytes(b"half")
    with pytest.raises(BadInput, match=r"b\.part is in the way"):
        small_bundle(tmp_path / "b")
    assert (part / "weights" / "0.safetensors").read_bytes() == b"half"
    (part / ".journal.jsonl").write_text('{"facts": null}\n')
    with locked_folder(part), pytest.raises(Busy, match="another process is writing"):
        small_bundle(tmp_path / "b")
    assert (part / "weights" / "0.safetensors").exists()
    assert verify_bundle(small_bundle(tmp_path / "b"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]


def test_two_exports_at_once_share_a_store(tmp_path, monkeypatch):
    """The other one puts the same file there between the look and the link."""
    store, link = tmp_path / "store", os.link
    first = small_bundle(tmp_path / "first")

    def late(source: Any, target: Any) -> None:
        if Path(target).parent == store and not Path(target).exists():
            link(weights_of(first), target)
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    second = small_bundle(tmp_path / "second", store=store)
    assert weights_of(first).samefile(weights_of(second))


def test_a_store_without_links_is_refused(tmp_path, monkeypatch):
    def refused(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(ArgosyError, match="cannot share files: invalid cross-device link"):
        small_bundle(tmp_path / "b", store=tmp_path / "store")
    assert not (tmp_path / "b").exists()


def test_versions_share_the_files_of_equal_weights(tmp_path):
    """By hard links through a store; a file there that was altered is not used."""
    store = tmp_path / "store"
    first, two = (small_bundle(tmp_path / name, store=store) for name in ("one", "two"))
    assert weights_of(first).samefile(weights_of(two))
    shared_file = store / weights_of(first).name
    assert shared_file.stat().st_nlink == 3
    shared_file.unlink()
    shared_file.write_bytes(b"altered")
    three = small_bundle(tmp_path / "three", store=store)
    assert verify_bundle(three)
    assert weights_of(three).samefile(shared_file)
    assert verify_bundle(first)


def test_weights_are_cut_into_files_of_a_size(tmp_path):
    """Of four tensors of 4,000 bytes, two share a file; a version that differs in one of them shares the other file."""

    class Four(nnx.Module):
        def __init__(self, last: float):
            self.a, self.b, self.c = (nnx.Param(jnp.full(1000, value)) for value in (1.0, 2.0, 3.0))
            self.d = nnx.Param(jnp.full(1000, last))

        def __call__(self, x: Any) -> Any:
            return x * (self.a[...] + self.b[...] + self.c[...] + self.d[...]).sum()

    for name, last in (("one", 4.0), ("two", 5.0)):
        argosy.export(Four(last), (jnp.ones(1),), tmp_path / name, platforms=["cpu"], shard_bytes=8000)
    first, two = (verify_bundle(tmp_path / name).weights for name in ("one", "two"))
    assert [sorted(file.tensors) for file in first] == [["a", "b"], ["c", "d"]]
    assert first[0].file == two[0].file
    assert first[1].file != two[1].file
