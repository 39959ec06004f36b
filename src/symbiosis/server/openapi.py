"""The OpenAPI 3.1 document: the routes of the app with the schemas of their requests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import models_json_schema

from symbiosis.server.auth import OPEN_PATHS, is_tenant_path
from symbiosis.server.openai.job_schemas import CreateJobRequest, FilesPage, Page
from symbiosis.server.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    PinAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from symbiosis.server.openai.strict_model import StrictModel
from symbiosis.version import VERSION

Document = dict[str, Any]
_JSON, _SSE, _TEXT, _BYTES = "application/json", "text/event-stream", "text/plain", "application/octet-stream"
_FILE = {"type": "string", "contentMediaType": _BYTES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    summary: str
    body: type[StrictModel] | None = None
    form: tuple[str, ...] = ()
    """Fields of a multipart form; `purpose` is a text, any other a file."""
    query: type[StrictModel] | None = None
    returns: tuple[str, ...] = (_JSON,)
    """Media types of the response."""
    status: int = 200


_OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/live"): Operation(summary="Whether the server responds."),
    ("GET", "/ready"): Operation(summary="Whether it takes requests: 503 without an engine, and while it shuts down."),
    ("GET", "/health"): Operation(summary="Whether the engine responds."),
    ("GET", "/ping"): Operation(summary="The same as /health."),
    ("GET", "/version"): Operation(summary="Version of the server."),
    ("GET", "/openapi.json"): Operation(summary="This document."),
    ("GET", "/metrics"): Operation(summary="Prometheus metrics.", returns=(_TEXT,)),
    ("GET", "/v1/statistics"): Operation(summary="Tenants, serving, jobs, adapters, memory by owner, and their history."),
    ("POST", "/tokenize"): Operation(summary="Tokens of a text or a chat.", body=TokenizeRequest),
    ("POST", "/detokenize"): Operation(summary="Text of tokens.", body=DetokenizeRequest),
    ("GET", "/v1/models"): Operation(summary="The base model and the caller's adapters."),
    ("GET", "/v1/models/{id}"): Operation(summary="One model."),
    ("DELETE", "/v1/models/{id}"): Operation(summary="Delete an adapter of the caller."),
    ("POST", "/v1/completions"): Operation(summary="Complete prompts.", body=CompletionRequest, returns=(_JSON, _SSE)),
    ("POST", "/v1/chat/completions"): Operation(summary="Answer a chat.", body=ChatRequest, returns=(_JSON, _SSE)),
    ("POST", "/v1/embeddings"): Operation(summary="Not supported: always an error."),
    ("GET", "/v1/adapters"): Operation(summary="The caller's adapters and the shared ones."),
    ("PUT", "/v1/adapters/{name}"): Operation(summary="Upload an adapter.", form=("config", "weights"), status=201),
    ("DELETE", "/v1/adapters/{name}"): Operation(summary="Delete an adapter of the caller."),
    ("GET", "/v1/adapters/{name}/{file}"): Operation(summary="Download a file of an adapter.", returns=(_BYTES,)),
    ("POST", "/v1/files"): Operation(summary="Upload training data.", form=("file", "purpose")),
    ("GET", "/v1/files"): Operation(summary="Files of the caller.", query=FilesPage),
    ("GET", "/v1/files/{id}"): Operation(summary="One file."),
    ("DELETE", "/v1/files/{id}"): Operation(summary="Delete a file."),
    ("GET", "/v1/files/{id}/content"): Operation(summary="Download a file.", returns=(_BYTES,)),
    ("POST", "/v1/fine_tuning/jobs"): Operation(summary="Create a fine-tuning job.", body=CreateJobRequest),
    ("GET", "/v1/fine_tuning/jobs"): Operation(summary="Jobs, newest first.", query=Page),
    ("GET", "/v1/fine_tuning/jobs/{id}"): Operation(summary="One job."),
    ("POST", "/v1/fine_tuning/jobs/{id}/cancel"): Operation(summary="Cancel a job."),
    ("POST", "/v1/fine_tuning/jobs/{id}/pause"): Operation(summary="Pause a job."),
    ("POST", "/v1/fine_tuning/jobs/{id}/resume"): Operation(summary="Resume a paused job."),
    ("GET", "/v1/fine_tuning/jobs/{id}/events"): Operation(summary="Events of a job, newest first.", query=Page),
    ("GET", "/v1/fine_tuning/jobs/{id}/checkpoints"): Operation(summary="Checkpoints of a job, newest first.", query=Page),
    ("POST", "/v1/load_lora_adapter"): Operation(
        summary="Load a shared adapter from --adapter-root.", body=LoadAdapterRequest, returns=(_TEXT,)
    ),
    ("POST", "/v1/unload_lora_adapter"): Operation(
        summary="Unload a shared adapter.", body=UnloadAdapterRequest, returns=(_TEXT,)
    ),
    ("POST", "/v1/pin_lora_adapter"): Operation(summary="Pin an adapter in device memory.", body=PinAdapterRequest),
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe_routes(routes: Iterable[tuple[str, str]]) -> Document:
    """The document of these methods and paths. Raises `KeyError` for a route without a description."""
    paths: dict[str, Document] = {}
    for method, route in routes:
        path = re.sub(r":[a-z]+\}", "}", route)
        paths.setdefault(path, {})[method.lower()] = _describe(method, path, _OPERATIONS[method, path])
    bodies = [(each.body, "validation") for each in _OPERATIONS.values() if each.body is not None]
    _, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]  # literal
    return {
        "openapi": "3.1.0",
        "info": {"title": "Symbiosis", "version": VERSION, "summary": "OpenAI's API over one shared base model."},
        "paths": paths,
        "security": [{"key": []}],
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {**schemas["$defs"], "Error": _ERROR},
            "responses": {"Error": {"description": "An error.", "content": _content(_JSON, {"$ref": _ref("Error")})}},
        },
    }


def _describe(method: str, path: str, operation: Operation) -> Document:
    names = re.findall(r"\{([a-z]+)\}", path)
    words = re.findall(r"[a-z0-9]+", path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    described: Document = {
        "operationId": "_".join([method.lower(), *words]),
        "summary": operation.summary,
        "tags": ["open" if path in OPEN_PATHS else "tenant" if is_tenant_path(path) else "admin"],
        "parameters": [*parameters, *_query_parameters(operation.query)],
        "responses": {
            str(operation.status): {
                "description": "Success.",
                "content": {kind: _media(kind) for kind in operation.returns},
            },
            "default": {"$ref": "#/components/responses/Error"},
        },
    }
    if path in OPEN_PATHS:
        described["security"] = []
    if operation.body is not None:
        content = _content(_JSON, {"$ref": _ref(operation.body.__name__)})
        described["requestBody"] = {"required": True, "content": content}
    elif operation.form:
        fields = {name: {"type": "string"} if name == "purpose" else _FILE for name in operation.form}
        schema = {"type": "object", "required": list(operation.form), "properties": fields}
        described["requestBody"] = {"required": True, "content": _content("multipart/form-data", schema)}
    return described


def _query_parameters(query: type[StrictModel] | None) -> list[Document]:
    properties = {} if query is None else query.model_json_schema()["properties"]
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in properties.items()]


def _media(kind: str) -> Document:
    return {"schema": {"type": "object"} if kind == _JSON else {"type": "string"}}


def _content(kind: str, schema: Document) -> Document:
    return {kind: {"schema": schema}}


def _ref(name: str) -> str:
    return f"#/components/schemas/{name}"
