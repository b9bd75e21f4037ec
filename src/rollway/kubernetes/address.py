"""The way to a DynamoGraphDeployment: `rollway.attach("dgd://NAMESPACE/NAME")`.

In a pod it is the frontend's Service, and the frontend's pod for the listing of workers. Elsewhere
a port of this process, on loopback, forwards through the API server with the caller's credentials:

    127.0.0.1:PORT/SECRET/service/…        ──► services/NAME-frontend:8000/proxy/…
                 …/SECRET/pod/POD/8001/…   ──► pods/POD:8001/proxy/…   the listing: addresses of
                 …/SECRET/pod/POD/PORT/…   ──► pods/POD:PORT/proxy/…   workers become these

The secret keeps other users of the machine from using those credentials.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from rollway.errors import ClusterError, Forbidden, StackNotRunning, UsageError
from rollway.kubernetes.api_server import make_rule
from rollway.kubernetes.client import Cluster
from rollway.kubernetes.objects import (
    DGD,
    DGD_LABEL,
    HTTP_PORT,
    LISTING_PORT,
    POD,
    SERVICE,
    TYPE_LABEL,
    Object,
    find_frontend,
)

SCHEME = "dgd"
COMPONENT_LABEL = "nvidia.com/dynamo-component"
_LISTING = "v1/rl/workers"
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "host", "content-length"})


def parse_target(target: str) -> tuple[str, str]:
    """Return the namespace and the name in `dgd://NAMESPACE/NAME`."""
    parts = urlsplit(target)
    name = parts.path.strip("/")
    if parts.scheme != SCHEME or not parts.netloc or not name or "/" in name:
        raise UsageError(f"`{target}` names no DynamoGraphDeployment.", "Use dgd://NAMESPACE/NAME.")
    return parts.netloc, name


@asynccontextmanager
async def reach_graph(
    target: str, *, cluster: Cluster | None = None
) -> AsyncIterator[tuple[str, str]]:
    """Yield the addresses of a graph's frontend and of its listing of workers.

    Raises:
        StackNotRunning: there is no such graph, or its frontend has no pod yet.
        Forbidden: the API server's proxy may not be used.
    """
    namespace, name = parse_target(target)
    if cluster is None:
        cluster = await asyncio.to_thread(Cluster.connect)
    cluster = cluster.in_namespace(namespace)
    graph = await asyncio.to_thread(_get_graph, cluster, name)
    service = find_frontend(graph)
    if service is None:
        raise UsageError(
            f"DynamoGraphDeployment {name} has no frontend.",
            "Attach to the graph whose frontend serves these workers.",
        )
    pod = await asyncio.to_thread(_find_frontend_pod, cluster, name)
    port = _read_listing_port(pod)
    if cluster.in_cluster:
        address = pod["status"]["podIP"]
        host = f"[{address}]" if ":" in address else address
        yield f"http://{service}.{namespace}.svc:{HTTP_PORT}", f"http://{host}:{port}"
        return
    await asyncio.to_thread(_check_proxy, cluster, service)
    async with Forwarder(cluster, service, name) as forwarder:
        listing = f"{forwarder.url}/pod/{pod['metadata']['name']}/{port}"
        yield f"{forwarder.url}/service", listing


class Forwarder:
    """A server on loopback that forwards to a graph through the API server's proxy."""

    def __init__(self, cluster: Cluster, service: str, graph: str) -> None:
        self._cluster = cluster
        self._service = service
        self._graph = graph
        self._secret = secrets.token_urlsafe(24)
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self._pods: dict[str, str] = {}
        """The names of the graph's pods by their addresses."""
        self._strangers: set[str] = set()
        """Addresses that no pod of the graph had when it was looked for."""
        self._read = 0.0
        self.url = ""

    async def __aenter__(self) -> Forwarder:
        connector = aiohttp.TCPConnector(ssl=self._cluster.connection.make_ssl_context(), limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),  # the caller's own limit holds
            auto_decompress=False,
        )
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", f"/{self._secret}/{{path:.*}}", self._forward)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}/{self._secret}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None and self._session is not None
        await self._runner.cleanup()
        await self._session.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        path, rest = self._find_path(request.match_info["path"])
        if path is None:
            return web.Response(status=404, text="no such way to the graph")
        connection = self._cluster.connection
        url = f"{connection.server}{path}/{rest}"
        if request.query_string:
            url += f"?{request.query_string}"
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in _HOP_BY_HOP and name.lower() != "authorization"
        }
        headers |= await asyncio.to_thread(connection.make_auth_headers)
        body = await request.read() if request.can_read_body else None
        try:
            async with self._session.request(
                request.method, url, data=body, headers=headers, allow_redirects=False
            ) as answer:
                if rest == _LISTING and answer.status == 200:
                    return await self._rewrite(json.loads(await answer.read()))
                return await _copy(request, answer)
        except aiohttp.ClientError as error:
            return web.Response(status=502, text=f"the API server does not answer: {error}")

    def _find_path(self, path: str) -> tuple[str | None, str]:
        """Return the path of the API server's proxy, and what to ask behind it."""
        namespace = self._cluster.namespace
        kind, _, rest = path.partition("/")
        if kind == "service":
            return f"{SERVICE.make_path(namespace)}/{self._service}:{HTTP_PORT}/proxy", rest
        pod, _, rest = rest.partition("/")
        port, _, rest = rest.partition("/")
        if kind != "pod" or not port.isdigit():
            return None, ""
        return f"{POD.make_path(namespace)}/{pod}:{port}/proxy", rest

    async def _rewrite(self, listing: Any) -> web.Response:
        """Answer with a listing whose admin addresses lead through this forwarder."""
        for entry in listing.get("workers") or []:
            address = urlsplit(entry.get("system_url") or "")
            if address.hostname is None:
                continue
            pod = await self._find_pod(address.hostname)
            if pod is None:
                entry["error"] = f"no pod of graph {self._graph} has the address {address.hostname}"
            else:
                entry["system_url"] = f"{self.url}/pod/{pod}/{address.port}"
        return web.json_response(listing)

    async def _find_pod(self, address: str) -> str | None:
        # A new worker's pod is not known yet; a stranger's address must not list pods all the time.
        is_due = address not in self._strangers or time.monotonic() - self._read > 1.0
        if address not in self._pods and is_due:
            self._read = time.monotonic()
            pods = await asyncio.to_thread(_list_pods, self._cluster, self._graph)
            self._pods = {
                pod["status"]["podIP"]: pod["metadata"]["name"]
                for pod in pods
                if pod.get("status", {}).get("podIP")
            }
            self._strangers = ({*self._strangers, address}) - self._pods.keys()
        return self._pods.get(address)


async def _copy(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Pass an answer on as it comes: tokens of a stream must not wait for its end."""
    kept = {
        name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP
    }
    response = web.StreamResponse(status=answer.status, headers=kept)
    await response.prepare(request)
    async for chunk in answer.content.iter_any():
        await response.write(chunk)
    await response.write_eof()
    return response


def _get_graph(cluster: Cluster, name: str) -> Object:
    graph = cluster.get(DGD, name)
    if graph is None:
        raise StackNotRunning(
            f"There is no DynamoGraphDeployment {name} in namespace {cluster.namespace}.",
            "`rollway k8s status` lists those of a run.",
        )
    return graph


def _list_pods(cluster: Cluster, graph: str) -> list[Object]:
    return cluster.list(POD, labels=f"{DGD_LABEL}={graph}")


def _find_frontend_pod(cluster: Cluster, graph: str) -> Object:
    for pod in _list_pods(cluster, graph):
        labels = pod["metadata"].get("labels") or {}
        kind = labels.get(TYPE_LABEL) or str(labels.get(COMPONENT_LABEL) or "").lower()
        if kind == "frontend" and pod.get("status", {}).get("podIP"):
            return pod
    raise StackNotRunning(
        f"The frontend of DynamoGraphDeployment {graph} has no running pod.",
        "Wait until it is ready: `rollway k8s status`.",
    )


def _read_listing_port(pod: Object) -> int:
    """Return where a frontend's pod lists the workers, by the environment of its containers."""
    for container in pod["spec"]["containers"]:
        for variable in container.get("env") or []:
            if variable.get("name") == "DYN_RL_PORT" and str(variable.get("value")).isdigit():
                return int(variable["value"])
    return LISTING_PORT


def _check_proxy(cluster: Cluster, service: str) -> None:
    """Raise the error that says what is missing, if the proxy cannot be used."""
    status, body = cluster.ask_service(service, HTTP_PORT, "/v1/models")
    if status in (502, 503, 504):
        raise ClusterError(
            f"The API server's proxy does not reach Service {service} ({status}):"
            f" {body[:200].decode(errors='replace')}",
            "Wait until its pods are ready, or attach from a pod of the cluster.",
        )
    for verb, kind in (("create", SERVICE), ("get", POD), ("create", POD)):
        if not cluster.may(verb, kind, "proxy"):
            rule = make_rule(verb, kind, "proxy")
            raise Forbidden(
                f"You may not send requests through the API server's proxy of {kind.plural}"
                f" in namespace {cluster.namespace}.",
                f"Add this rule to your Role, or attach from a pod: {json.dumps(rule)}",
                rule=rule,
            )
