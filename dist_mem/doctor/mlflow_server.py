"""Would MLflow's server let this run in, and is it there? Rank 0 asks."""

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
    """What keeps MLflow from taking what this run will send.

    Args:
        is_patient: also wait for a server that may not be there, which a run does not need.
    """
    if not config.tracking.mlflow:
        return
    try:
        check_tracking(config, Path(config.run_dir))
    except UnusableError as error:
        told, _, fix = str(error).partition("; ")
        # A run that MLflow has taken before goes on, as it does when a token is revoked in its midst: all is kept.
        level = warning if (Path(config.run_dir) / JOURNAL).exists() else fail
        yield level("MLflow", told, fix or "tracking.send=never goes without it")
        return
    uri, sending = store_uri(config), choose_sending(config)
    if is_patient and is_server(uri) and sending.is_on and not _answers(uri):
        fix = "look at tracking.uri, proxies, the firewall; a run keeps its metrics until it is back"
        yield warning("MLflow", f"{without_credentials(uri)} does not answer", fix)
    else:
        yield ok("MLflow", sending.message.removeprefix("MLflow: "))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another host is not asked: the user has named this one."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _answers(uri: str) -> bool:
    """Whether anything answers there, through the user's proxies; what it says does not matter.

    Credentials in the address are left out: urllib would take them for a part of the host's name.
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
