"""Real MLflow for tests: a server that can be killed and restarted, addresses that never answer, points of a run."""

import os
import signal
import socket
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from dist_mem.runtime.network_interface import free_port
from tests.support.limits import limit, wait_until

Points = Counter[tuple[str, int, int, float]]  # (name, step, time in milliseconds, value) -> how often


@contextmanager
def silent_address(*, accepting: bool) -> Iterator[str]:
    """Yield the URI of a listener that never answers: it accepts connections and sends nothing, or drops every SYN."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(100 if accepting else 0)
        host, port = listener.getsockname()
        fillers = []
        for _ in range(0 if accepting else 8):  # the queue holds one or two; Linux drops further connections
            filler = socket.socket()
            filler.setblocking(False)
            with suppress(BlockingIOError):
                filler.connect((host, port))
            fillers.append(filler)
        yield f"http://{host}:{port}"
        for filler in fillers:
            filler.close()


def points_of(client: Any, run_id: str) -> Points:
    """Return every point that MLflow has of a run."""
    names = client.get_run(run_id).data.metrics
    return Counter(
        (name, point.step, point.timestamp, point.value)
        for name in names
        for point in client.get_metric_history(run_id, name)
    )


class MlflowServer:
    """`mlflow server` on a loopback port, with an SQLite file that survives it."""

    def __init__(
        self,
        folder: Path,
        *,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        """Choose a port; the server is not started.

        Args:
            options: further options of `mlflow server`.
            trust: context that trusts the server's certificate, if the options set one.
        """
        self.uri = f"{'https' if trust else 'http'}://127.0.0.1:{free_port()}"
        self.folder = folder
        self._options = options
        self._environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # saves six processes
        self._environment |= environment or {}
        self._trust = trust
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server; return when it answers."""
        port = self.uri.rsplit(":", 1)[1]
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", port, "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        command += self._options
        with (self.folder / "log").open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, env=self._environment, start_new_session=True
            )
        process = self._process
        wait_until(lambda: self._answers() or process.poll() is not None, "the MLflow server", seconds=180)
        assert process.poll() is None, (self.folder / "log").read_text()

    def kill(self) -> None:
        """Send SIGKILL to the server and its worker, which are the session of `start`."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def close(self) -> None:
        """Kill the server if it is running."""
        if self._process is not None:
            self.kill()

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.uri}/health", timeout=limit(5), context=self._trust) as response:
                return bool(response.status == 200)
        except (URLError, ConnectionError):
            return False
