"""A stand-in for the job API of a Ray head's dashboard (`/api/jobs/`).

Ray's own dashboard needs packages that the test environment does not have (`ray[default]`). This
one runs entry points as real processes of `/bin/sh`, and answers as Ray 2.60 does.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rollway.kubernetes.objects import Object


class Dashboard:
    """The job API of a Ray head, as a stand-in: entry points run on this machine."""

    def __init__(self, address: str, folder: Path) -> None:
        self._folder = folder
        self._jobs: dict[str, tuple[subprocess.Popen[bytes], Object]] = {}
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer((address, 0), self._make_handler())
        self.port = int(self._server.server_address[1])
        self.url = f"http://{address}:{self.port}"
        folder.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for process, _ in self._jobs.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def list_jobs(self) -> list[Object]:
        return [self._describe(name) for name in self._jobs]

    def submit(self, body: Object) -> tuple[int, Object]:
        name = body.get("submission_id") or f"raysubmit_{secrets.token_hex(8)}"
        with self._lock:
            if name in self._jobs:
                return 400, {"error": f"Job with submission_id {name} already exists."}
            environment = body.get("runtime_env") or {}
            env, folder = environment.get("env_vars") or {}, self._folder
            if package := environment.get("working_dir"):
                folder = self._unpack(package.removeprefix("gcs://"))
            with (self._folder / f"{name}.log").open("wb") as log:
                process = subprocess.Popen(
                    ["/bin/sh", "-c", body["entrypoint"]],
                    cwd=folder,
                    env={**os.environ, **env},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._jobs[name] = process, body
        return 200, {"job_id": name, "submission_id": name}

    def find_package(self, name: str) -> Path:
        """Return where a package of files is, or would be."""
        return self._folder / "packages" / Path(name).name

    def _unpack(self, package: str) -> Path:
        folder = self._folder / "unpacked" / Path(package).stem
        with zipfile.ZipFile(self.find_package(package)) as archive:
            archive.extractall(folder)
        return folder

    def read_log(self, name: str) -> str:
        log = self._folder / f"{name}.log"
        return log.read_text() if log.exists() else ""

    def find_status(self, name: str) -> str:
        """Return RUNNING, SUCCEEDED or FAILED; empty for a job that was never submitted."""
        if name not in self._jobs:
            return ""
        code = self._jobs[name][0].poll()
        if code is None:
            return "RUNNING"
        return "SUCCEEDED" if code == 0 else "FAILED"

    def _describe(self, name: str) -> Object:
        process, body = self._jobs[name]
        status = self.find_status(name)
        ended = f"Job entrypoint command failed with exit code {process.poll()}."
        return {
            "type": "SUBMISSION",
            "submission_id": name,
            "job_id": None,
            "entrypoint": body["entrypoint"],
            "status": status,
            "message": ended if status == "FAILED" else "",
            "metadata": body.get("metadata") or {},
            "driver_exit_code": process.poll(),
        }

    def _stop_job(self, name: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._jobs[name][0].pid, signal.SIGTERM)

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        dashboard = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                _, _, kind, name, *rest = [*self.path.rstrip("/").split("/"), "", ""]
                if kind == "packages":
                    self._answer(200 if dashboard.find_package(rest[0]).exists() else 404, {})
                elif not name:
                    self._answer(200, dashboard.list_jobs())
                elif name not in dashboard._jobs:
                    self._answer(404, {"error": f"Job {name} does not exist."})
                elif rest[0] == "logs":
                    self._answer(200, {"logs": dashboard.read_log(name)})
                else:
                    self._answer(200, dashboard._describe(name))

            def do_PUT(self) -> None:
                path = dashboard.find_package(self.path)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(200, {})

            def do_DELETE(self) -> None:
                name = self.path.rpartition("/")[2]
                if dashboard.find_status(name) == "RUNNING":  # as Ray
                    self._answer(500, {"error": f"Job {name} is in a non-terminal state."})
                    return
                dashboard._jobs.pop(name, None)
                self._answer(200, {"deleted": True})

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                parts = self.path.rstrip("/").split("/")
                if parts[-1] == "stop":
                    dashboard._stop_job(parts[-2])
                    self._answer(200, {"stopped": True})
                else:
                    self._answer(*dashboard.submit(body))

            def _answer(self, status: int, answer: Any) -> None:
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
