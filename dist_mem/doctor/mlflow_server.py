"""Check that the MLflow server answers and accepts this run; rank 0 does it."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dist_mem.errors import UnusableError
from dist_mem.runtime.findings import Remark, fail, ok, warning
from dist_mem.tracking.access_check import check_tracking
from dist_mem.tracking.provenance import without_credentials
from dist_mem.tracking.start import JOURNAL
from dist_mem.tracking.stores import choose_sending, is_server, store_uri

_SECONDS = 2.5


def check_mlflow(config: Any, *, is_patient: bool) -> Iterator[Remark]:
    """Yield the result of the MLflow checks: why it would not accept this run's data, or that it would.

    Args:
        is_patient: also wait for a server that may be down; a run itself does not need the server.
    """
    if not config.tracking.mlflow:
        return
    try:
        check_tracking(config, Path(config.run_dir))
    except UnusableError as error:
        problem, _, fix = str(error).partition("; ")
        # A run that MLflow has accepted before continues, as when a token is revoked during a run: its data are kept.
        level = warning if (Path(config.run_dir) / JOURNAL).exists() else fail
        yield level("MLflow", problem, fix or "tracking.send=never goes without it")
        return
    uri, sending = store_uri(config), choose_sending(config)
    if is_patient and is_server(uri) and sending.is_on and not _answers(uri):
        fix = "look at tracking.uri, proxies, the firewall; a run keeps its metrics until it is back"
        yield warning("MLflow", f"{without_credentials(uri)} does not answer", fix)
    else:
        yield ok("MLflow", sending.message.removeprefix("MLflow: "))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the user has named this host, and no other is contacted."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _answers(uri: str) -> bool:
    """Return whether a server answers at the address, through the user's proxies, whatever its response.

    Credentials are removed from the address: urllib would parse them as a part of the host name.
    """
    parts = urllib.parse.urlsplit(uri)
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        opener.open(f"{address.rstrip('/')}/health", timeout=_SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False
    return True
