"""Which source of credentials a store's client takes, so that a refusal can say whose credentials were refused.

The order is that of the client library (Rust ``object_store`` 0.13: ``aws/builder.rs``, ``gcp/builder.rs``, ``azure/builder.rs``), which
reads the environment itself. AWS profiles it does not know; they go through boto3, where that is installed. No value is ever read
here, only whether there is one.
"""

from collections.abc import Mapping
from pathlib import Path

PROFILE = "AWS profile"


def source_of(scheme: str, environment: Mapping[str, str], home: Path) -> str:
    """The source of credentials for URLs of ``scheme``, in words."""
    if scheme == "s3":
        return _aws(environment, home)
    return _google(environment, home) if scheme == "gs" else _azure(environment)


def _aws(environment: Mapping[str, str], home: Path) -> str:
    if environment.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        return "none, by AWS_SKIP_SIGNATURE"
    if environment.get("AWS_ACCESS_KEY_ID"):
        return "environment, AWS_ACCESS_KEY_ID"
    if environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return "web identity"
    if environment.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") or environment.get(
        "AWS_CONTAINER_CREDENTIALS_FULL_URI"
    ):
        return "container"
    shared = environment.get("AWS_SHARED_CREDENTIALS_FILE") or str(home / ".aws" / "credentials")
    if environment.get("AWS_PROFILE") or Path(shared).exists():
        return PROFILE
    return "instance metadata"


def _google(environment: Mapping[str, str], home: Path) -> str:
    for name in (
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ):
        if environment.get(name):
            return f"environment, {name}"
    if (home / ".config" / "gcloud" / "application_default_credentials.json").exists():
        return "gcloud's application default credentials"
    return "instance metadata"


def _azure(environment: Mapping[str, str]) -> str:
    for name, source in (
        ("AZURE_STORAGE_TOKEN", "environment, AZURE_STORAGE_TOKEN"),
        ("AZURE_STORAGE_ACCOUNT_KEY", "environment, AZURE_STORAGE_ACCOUNT_KEY"),
        ("AZURE_STORAGE_ACCESS_KEY", "environment, AZURE_STORAGE_ACCESS_KEY"),
        ("AZURE_FEDERATED_TOKEN_FILE", "workload identity"),
        ("AZURE_STORAGE_CLIENT_SECRET", "environment, client secret"),
        ("AZURE_CLIENT_SECRET", "environment, client secret"),
        ("AZURE_STORAGE_SAS_KEY", "environment, AZURE_STORAGE_SAS_KEY"),
        ("AZURE_STORAGE_SAS_TOKEN", "environment, AZURE_STORAGE_SAS_TOKEN"),
    ):
        if environment.get(name):
            return source
    if environment.get("AZURE_USE_AZURE_CLI", "").lower() in ("1", "true"):
        return "Azure CLI"
    if environment.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true"):
        return "the emulator's own"
    return "instance metadata"
