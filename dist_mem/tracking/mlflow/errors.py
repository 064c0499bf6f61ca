"""What the errors of MLflow's client mean: whether it refuses something for good, and what the user can set."""

from __future__ import annotations

import re

from dist_mem.runtime.environment import mlflow_credentials_set
from dist_mem.tracking.log import LogError

_SERVER_CERTIFICATE, _CLIENT_CERTIFICATE = "MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_TRACKING_CLIENT_CERT_PATH"


def is_refusal(error: Exception) -> bool:
    """Whether MLflow will never accept this entry: a bad value, a deleted run, a missing file."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.get_http_status_code() in (400, 404)
    return isinstance(error, (FileNotFoundError, LogError))


def brief(error: Exception) -> str:
    """Return an error in one line, without the user and password of URLs in the messages of MLflow's client."""
    if refusal := what_to_set(error):
        return refusal
    first_line = re.sub(r"//[^/\s]*@", "//", (str(error).splitlines() or [""])[0])
    return f"{type(error).__name__}: {first_line[:300]}"


def what_to_set(error: Exception) -> str | None:
    """Return why a server refuses access, and what the user can do; None if the error is no refusal."""
    status, text = getattr(error, "get_http_status_code", lambda: None)(), str(error)
    if status == 401:
        given = " and ".join(mlflow_credentials_set())
        reason = f"it refuses {given}" if given else "it requires credentials"
        variables = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        return f"401: {reason}; set {variables}, or ~/.mlflow/credentials"
    if status == 403:
        reason = "403: the user is known, but may not write to this experiment or run"
        return f"{reason}; ask for the permission EDIT, or set tracking.experiment"
    if "407 Proxy Authentication" in text:
        return "407: the proxy of HTTPS_PROXY asks for a user and password: http://USER:PASSWORD@HOST:PORT"
    # An expired certificate is a temporary fault of the server, one that is not valid yet of a clock.
    if "CERTIFICATE_VERIFY_FAILED" in text and not re.search("expired|not yet valid", text):
        found = re.search(r"certificate verify failed: ([^(']*)", text)
        reason = f"its certificate is not trusted ({found[1].strip() if found else 'verify failed'})"
        return f"{reason}; set {_SERVER_CERTIFICATE} to the file of its CA, in PEM"
    if "CERTIFICATE_REQUIRED" in text:
        reason = "it asks for a certificate of the client"
        return f"{reason}; set {_CLIENT_CERTIFICATE} to a PEM file with certificate and key"
    if "TLS CA certificate bundle" in text:
        return f"{_SERVER_CERTIFICATE} names no file: {text.rpartition(': ')[2]}"
    if "TLS certificate file" in text:
        return f"{_CLIENT_CERTIFICATE} names no file: {text.rpartition(': ')[2]}"
    if "MLFLOW_ALLOW_FILE_STORE" in text:
        return "MLflow keeps no more runs in folders; set tracking.uri=sqlite:///mlflow.db, or a server"
    if "MLFLOW_TRACKING_INSECURE_TLS" in text:
        return f"MLFLOW_TRACKING_INSECURE_TLS and {_SERVER_CERTIFICATE} are both set; unset one of them"
    return None
