"""Ed25519 signatures of a manifest (RFC 8032). They prove who wrote a bundle; hashes alone prove only that it is intact.

`manifest.sig` holds the 64 bytes of a signature of the bytes of `manifest.json`, so `openssl pkeyutl -verify -rawin` checks it too.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from argosy.core.command import install_extra
from argosy.core.errors import BadInput, Damaged, Unsupported
from argosy.export.manifest import MANIFEST, SEAL

SIGNATURE_BYTES = 64


def sign_manifest(data: bytes, key: str | Path) -> bytes:
    """Signs the bytes of a manifest.

    Args:
        key: a file with an ed25519 private key in PEM, without a password.

    Raises:
        BadInput: there is no such file, or it holds no such key.
        Unsupported: the package `cryptography` is not installed.
    """
    keys, serialization = _library()
    try:
        private_key = serialization.load_pem_private_key(_key_bytes(key), None)
    except (ValueError, TypeError) as error:
        raise BadInput(f"{key} holds no private key without a password: {error}", hint=_HINT) from None
    if not isinstance(private_key, keys.Ed25519PrivateKey):
        raise BadInput(f"{key} holds no ed25519 key", hint=_HINT)
    return private_key.sign(data)


def check_signature(data: bytes, signature: bytes, key: str | Path, where: str) -> None:
    """Checks that the owner of a key signed a manifest.

    Args:
        key: a file with an ed25519 public key in PEM.
        where: the path of the bundle, for errors.

    Raises:
        Damaged: the signature is missing, or was not made with this key.
        BadInput: there is no such file, or it holds no such key.
        Unsupported: the package `cryptography` is not installed.
    """
    keys, serialization = _library()
    try:
        public_key: Any = serialization.load_pem_public_key(_key_bytes(key))
    except ValueError as error:
        raise BadInput(f"{key} holds no public key: {error}", hint=_HINT) from None
    if not isinstance(public_key, keys.Ed25519PublicKey):
        raise BadInput(f"{key} holds no ed25519 key", hint=_HINT)
    try:
        public_key.verify(signature, data)
    except import_module("cryptography.exceptions").InvalidSignature:
        raise Damaged(f"{SEAL} is no signature of {MANIFEST} by {key}", where=where) from None


_HINT = "`openssl genpkey -algorithm ed25519 -out KEY.pem`, `openssl pkey -in KEY.pem -pubout -out PUB.pem`"


def _key_bytes(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"the key {path} cannot be read: {error.strerror}") from None


def _library() -> tuple[Any, Any]:
    try:
        keys = import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
        return keys, import_module("cryptography.hazmat.primitives.serialization")
    except ImportError:
        problem = "signatures need the package `cryptography`, which is not installed"
        raise Unsupported(problem, hint=install_extra("sign")) from None
