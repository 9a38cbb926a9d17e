//! The OpenAPI document, generated from the route table.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::App;
use super::routes::{ROUTES, RequestBodyKind, ResponseBodyKind, Route};
use crate::store::Variant;

pub(super) async fn document(State(app): State<Arc<App>>) -> Response {
    Json(&app.openapi).into_response()
}

/// Builds the document. If `has_keys` is true, the document requires a bearer token. `request` is the schema of the
/// fields of a request.
pub(crate) fn build(has_keys: bool, request: &Value) -> Value {
    let mut paths = Map::new();
    for route in ROUTES {
        let item = paths.entry(route.path).or_insert_with(|| json!({}));
        item[route.method.to_lowercase()] = operation(route);
    }
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "ltx2 serve",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Generates videos with audio as asynchronous jobs; compatible with OpenAI's /v1/videos.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": schemas(request)},
    });
    if has_keys {
        document["security"] = json!([{"key": []}]);
        document["components"]["securitySchemes"] = json!({"key": {"type": "http", "scheme": "bearer"}});
    }
    document
}

fn operation(route: &Route) -> Value {
    let mut parameters: Vec<Value> = Vec::new();
    for part in route.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}')) {
        parameters.push(json!({"name": part, "in": "path", "required": true, "schema": {"type": "string"}}));
    }
    for name in route.query {
        parameters.push(json!({"name": name, "in": "query", "schema": query_schema(name)}));
    }
    let mut operation = json!({
        "operationId": operation_id(route),
        "summary": route.summary,
        "responses": responses(route.gives),
    });
    if !parameters.is_empty() {
        operation["parameters"] = Value::Array(parameters);
    }
    if route.takes == RequestBodyKind::Fields {
        let schema = json!({"$ref": "#/components/schemas/Create"});
        operation["requestBody"] = json!({
            "required": true,
            "content": {"application/json": {"schema": schema}, "multipart/form-data": {"schema": schema}},
        });
    }
    if matches!(route.path, "/" | "/live" | "/health" | "/ready") {
        operation["security"] = json!([]);
    }
    operation
}

fn operation_id(route: &Route) -> String {
    let words = route.path.split(['/', '{', '}', '.', '_']).filter(|word| !word.is_empty());
    let words: Vec<&str> = std::iter::once(route.method).chain(words).collect();
    words.join("_").to_lowercase()
}

fn query_schema(name: &str) -> Value {
    match name {
        "limit" => json!({"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
        "order" => json!({"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
        "status" => json!({"type": "string", "enum": ["queued", "in_progress", "completed", "failed"]}),
        "variant" => {
            let names: Vec<&str> = Variant::each().map(Variant::name).collect();
            json!({"type": "string", "enum": names, "default": "video"})
        }
        _ => json!({"type": "string"}),
    }
}

fn responses(gives: ResponseBodyKind) -> Value {
    let reference = |name: &str| json!({"$ref": format!("#/components/schemas/{name}")});
    let (media, schema) = match gives {
        ResponseBodyKind::Video => ("application/json", reference("Video")),
        ResponseBodyKind::Videos => ("application/json", reference("VideoList")),
        ResponseBodyKind::Deleted => ("application/json", reference("VideoDeleted")),
        ResponseBodyKind::Queue => ("application/json", reference("Queue")),
        ResponseBodyKind::Models => ("application/json", reference("ModelList")),
        ResponseBodyKind::Model => ("application/json", reference("Model")),
        ResponseBodyKind::Adapters | ResponseBodyKind::Json => ("application/json", json!({"type": "object"})),
        ResponseBodyKind::Events => ("text/event-stream", json!({"type": "string"})),
        ResponseBodyKind::Media => ("video/mp4", json!({"type": "string", "format": "binary"})),
        ResponseBodyKind::Text => ("application/openmetrics-text", json!({"type": "string"})),
        ResponseBodyKind::Html => ("text/html", json!({"type": "string"})),
        ResponseBodyKind::Refusal => return json!({"default": error_response()}),
    };
    json!({
        "200": {"description": "Success.", "content": {media: {"schema": schema}}},
        "default": error_response(),
    })
}

fn error_response() -> Value {
    json!({
        "description": "An error. `code` is machine-readable; `param` is the name of the invalid field, if any.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    })
}

/// Returns the schema of the video object that `objects::video` builds.
fn video() -> Value {
    let text = json!({"type": "string"});
    let maybe = |kind: &str| json!({"type": [kind, "null"]});
    json!({
        "type": "object",
        "required": ["id", "object", "model", "status", "progress", "created_at", "seconds", "size"],
        "properties": {
            "id": {"type": "string", "pattern": "^video_[0-9a-hjkmnp-tv-z]{26}$"},
            "object": {"const": "video"},
            "model": text,
            "status": {"type": "string", "enum": ["queued", "in_progress", "completed", "failed"]},
            "progress": {"type": "integer", "minimum": 0, "maximum": 100},
            "created_at": {"type": "integer"},
            "started_at": maybe("integer"),
            "completed_at": maybe("integer"),
            "expires_at": maybe("integer"),
            "prompt": maybe("string"),
            "enhanced_prompt": maybe("string"),
            "size": text,
            "seconds": text,
            "error": {"oneOf": [{"type": "null"}, {"$ref": "#/components/schemas/Failure"}]},
            "remixed_from_video_id": maybe("string"),
            "width": {"type": "integer"},
            "height": {"type": "integer"},
            "num_frames": maybe("integer"),
            "fps": {"type": "number"},
            "duration_s": maybe("number"),
            "seed": {"type": "integer"},
            "pipeline": text,
            "steps": {"type": "integer"},
            "phase": maybe("string"),
            "step": maybe("integer"),
            "queue_position": maybe("integer"),
            "eta_s": maybe("number"),
            "batch": {"type": "integer"},
            "attempts": {"type": "integer"},
            "user": maybe("string"),
            "metadata": {"type": "object"},
            "warnings": {"type": "array", "items": text},
            "timings": maybe("object"),
            "links": {"type": "object"},
        },
    })
}

fn schemas(request: &Value) -> Value {
    let text = json!({"type": "string"});
    let maybe = |kind: &str| json!({"type": [kind, "null"]});
    let list = |name: &str| {
        json!({
            "type": "object",
            "required": ["object", "data"],
            "properties": {
                "object": {"const": "list"},
                "data": {"type": "array", "items": {"$ref": format!("#/components/schemas/{name}")}},
                "first_id": {"type": ["string", "null"]},
                "last_id": {"type": ["string", "null"]},
                "has_more": {"type": "boolean"},
            },
        })
    };
    json!({
        "Create": request,
        "Video": video(),
        "VideoList": list("Video"),
        "VideoDeleted": {
            "type": "object",
            "properties": {"id": text, "object": {"const": "video.deleted"}, "deleted": {"type": "boolean"}},
        },
        "Queue": {
            "type": "object",
            "properties": {
                "object": {"const": "queue"},
                "running": {"type": "array", "items": text},
                "stopping": {"type": "array", "items": text},
                "queued": {"type": "array", "items": text},
                "limit": {"type": "integer"},
                "eta_s": maybe("number"),
            },
        },
        "ModelList": list("Model"),
        "Model": {
            "type": "object",
            "required": ["id", "object", "created", "owned_by"],
            "properties": {"id": text, "object": {"const": "model"}, "created": {"type": "integer"}, "owned_by": text},
        },
        "Failure": {
            "type": "object",
            "required": ["message", "code"],
            "properties": {"message": text, "type": text, "param": maybe("string"), "code": text},
        },
        "Error": {"type": "object", "required": ["error"], "properties": {"error": {"$ref": "#/components/schemas/Failure"}}},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_resolve_and_operation_ids_are_unique() {
        let request = json!({"type": "object"});
        let document = build(true, &request);
        let text = document.to_string();
        for part in text.split("#/components/schemas/").skip(1) {
            let name: String = part.chars().take_while(char::is_ascii_alphanumeric).collect();
            assert!(document["components"]["schemas"].get(&name).is_some(), "{name}");
        }
        assert_eq!(document["security"], json!([{"key": []}]));
        let open = build(false, &request);
        assert!(open.get("security").is_none() && open["components"].get("securitySchemes").is_none());
        let mut names: Vec<String> = ROUTES.iter().map(operation_id).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), ROUTES.len());
    }
}
