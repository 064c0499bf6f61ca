"""Explain a server's refusal, and what to set, in one line for each of MLflow's exceptions.

A server that is down, slow or unreachable is not a refusal, because that passes. No message contains a secret.
"""

from __future__ import annotations

import re

from dist_mem.runtime.environment import mlflow_credentials_set

_CREDENTIALS = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"


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
        reason = f"401: it refuses {given}" if given else "401: it requires credentials"
        return f"{reason}; set {_CREDENTIALS}, or ~/.mlflow/credentials"
    if status == 403:
        return (
            "403: the user is known, but may not write to this experiment or run; ask for the permission EDIT, or set "
            "tracking.experiment"
        )
    if "407 Proxy Authentication" in text:
        return "407: the proxy of HTTPS_PROXY asks for a user and password: http://USER:PASSWORD@HOST:PORT"
    return _about_certificates(text)


def _about_certificates(text: str) -> str | None:
    if "CERTIFICATE_VERIFY_FAILED" in text and "expired" not in text:  # expired: a temporary fault of the server
        reason = re.search(r"certificate verify failed: ([^(']*)", text)
        return (
            f"its certificate is not trusted ({reason[1].strip() if reason else 'verify failed'}); set "
            "MLFLOW_TRACKING_SERVER_CERT_PATH to the file of its CA, in PEM"
        )
    if "CERTIFICATE_REQUIRED" in text:
        return (
            "it asks for a certificate of the client; set MLFLOW_TRACKING_CLIENT_CERT_PATH to a PEM file with "
            "certificate and key"
        )
    if "TLS CA certificate bundle" in text:
        return f"MLFLOW_TRACKING_SERVER_CERT_PATH names no file: {text.rpartition(': ')[2]}"
    if "TLS certificate file" in text:
        return f"MLFLOW_TRACKING_CLIENT_CERT_PATH names no file: {text.rpartition(': ')[2]}"
    if "MLFLOW_TRACKING_INSECURE_TLS" in text:
        return "MLFLOW_TRACKING_INSECURE_TLS and MLFLOW_TRACKING_SERVER_CERT_PATH are both set; unset one of them"
    return None
