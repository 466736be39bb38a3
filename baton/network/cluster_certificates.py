"""Certificates for mutual TLS between the processes of a cluster, derived from the cluster token.

Only a process with the token can make a certificate that the others accept. docs/design/0003 and
docs/design/0006 have the reasons. The key of the cluster's certificate authority is derived from
the token. Each process makes the authority's certificate and one for a fresh key, so that no key or
certificate is in a file. A certificate says which end it is for: a writer cannot act as a decode
node, nor a decode node as the coordinator.
"""

import datetime
from collections.abc import Callable
from functools import lru_cache

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.network.cluster_secret import derive_secret

DECODE_CERTIFICATE_NAME = "decode.baton.internal"  # what a writer expects, at any address
COORDINATOR_CERTIFICATE_NAME = "coordinator.baton.internal"  # what a node or a pool expects
_NODE_CERTIFICATE_NAME = "node.baton.internal"
_WRITER_CERTIFICATE_NAME = "writer.baton.internal"
_AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "baton cluster")])
_CURVE_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of NIST P-256
# Certificates are valid as long as the token is used: clocks of hosts are never compared, and the
# clock of a host may still be at the epoch.
_VALID_FROM = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
# RFC 5280, 4.1.2.5: no well-defined expiration date.
_VALID_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


def decode_server_credentials(token: str) -> grpc.ServerCredentials:
    """Credentials of a decode node's server, which requires a certificate of this cluster."""
    authority = _derive_authority_key(token)
    decode_certificate = _issue_certificate(
        authority, DECODE_CERTIFICATE_NAME, ExtendedKeyUsageOID.SERVER_AUTH
    )
    return grpc.ssl_server_credentials(
        [decode_certificate], _authority_certificate(authority), require_client_auth=True
    )


def writer_channel_credentials(token: str) -> grpc.ChannelCredentials:
    return _channel_credentials(token, _WRITER_CERTIFICATE_NAME)


def _channel_credentials(token: str, name: str) -> grpc.ChannelCredentials:
    authority = _derive_authority_key(token)
    key, certificate = _issue_certificate(authority, name, ExtendedKeyUsageOID.CLIENT_AUTH)
    return grpc.ssl_channel_credentials(_authority_certificate(authority), key, certificate)


def coordinator_server_credentials(
    token: str, on_handshake: Callable[[], None]
) -> grpc.ServerCredentials:
    """Credentials of the cluster port.

    gRPC calls `on_handshake` on one of its threads whenever a connection begins a handshake.
    """
    authority = _derive_authority_key(token)
    certificate = _issue_certificate(
        authority, COORDINATOR_CERTIFICATE_NAME, ExtendedKeyUsageOID.SERVER_AUTH
    )
    configuration = grpc.ssl_server_certificate_configuration(
        [certificate], _authority_certificate(authority)
    )

    def fetch() -> None:  # gRPC asks for a newer configuration; None keeps the present one
        on_handshake()

    return grpc.dynamic_ssl_server_credentials(
        configuration, fetch, require_client_authentication=True
    )


def node_channel_credentials(token: str) -> grpc.ChannelCredentials:
    """Credentials of a node or a pool that dials the coordinator."""
    return _channel_credentials(token, _NODE_CERTIFICATE_NAME)


@lru_cache(maxsize=8)
def _derive_authority_key(token: str) -> ec.EllipticCurvePrivateKey:
    """Derive the authority's private key from the token.

    40 bytes are derived for a number of 32 bytes, so that all values are equally likely (FIPS
    186-5, A.2.1, extra random bits).
    """
    seed = int.from_bytes(derive_secret(token, b"baton cluster authority v1", 40), "big")
    return ec.derive_private_key(seed % (_CURVE_ORDER - 1) + 1, ec.SECP256R1())


def _authority_certificate(authority: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the authority's certificate as PEM.

    It has another serial number and signature in each process. That does not matter, because chains
    are checked against its name and key.
    """
    use = _key_usage(certificates=True)
    built = _certificate_builder(_AUTHORITY, authority.public_key(), authority)
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return _sign_to_pem(built.add_extension(use, critical=True), authority)


def _issue_certificate(
    authority: ec.EllipticCurvePrivateKey, name: str, purpose: x509.ObjectIdentifier
) -> tuple[bytes, bytes]:
    """Return a fresh private key and its certificate, both as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    built = _certificate_builder(subject, key.public_key(), authority)
    built = built.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    built = built.add_extension(_key_usage(certificates=False), critical=True)
    built = built.add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
    built = built.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return secret, _sign_to_pem(built, authority)


def _certificate_builder(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, authority: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    built = x509.CertificateBuilder(
        issuer_name=_AUTHORITY,
        subject_name=subject,
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=_VALID_FROM,
        not_valid_after=_VALID_UNTIL,
    )
    built = built.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    return built.add_extension(issuer, critical=False)


def _key_usage(*, certificates: bool) -> x509.KeyUsage:
    """Return the key usage for signing certificates, or else handshakes."""
    return x509.KeyUsage(
        digital_signature=not certificates,
        key_cert_sign=certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _sign_to_pem(built: x509.CertificateBuilder, authority: ec.EllipticCurvePrivateKey) -> bytes:
    return built.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
