//! The route table, from which the router and the OpenAPI document are built.

/// Request body of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestBodyKind {
    Nothing,
    /// Fields of a video request, as JSON or as a multipart form.
    Fields,
}

/// Response body of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResponseBodyKind {
    Video,
    Videos,
    Deleted,
    Queue,
    Models,
    Model,
    Adapters,
    Events,
    Media,
    Json,
    Text,
    Html,
    /// The route always responds with an error.
    Refusal,
}

/// A row of the route table.
pub(super) struct Route {
    pub(super) path: &'static str,
    pub(super) method: &'static str,
    pub(super) summary: &'static str,
    pub(super) takes: RequestBodyKind,
    pub(super) gives: ResponseBodyKind,
    /// Names of the query parameters.
    pub(super) query: &'static [&'static str],
}

const fn route(
    method: &'static str,
    path: &'static str,
    takes: RequestBodyKind,
    gives: ResponseBodyKind,
    summary: &'static str,
) -> Route {
    Route { path, method, summary, takes, gives, query: &[] }
}

const fn asks(route: Route, query: &'static [&'static str]) -> Route {
    Route { query, ..route }
}

use RequestBodyKind::{Fields, Nothing};
use ResponseBodyKind::{
    Adapters, Deleted, Events, Html, Json, Media, Model, Models, Queue, Refusal, Text, Video, Videos,
};

const GET: &str = "GET";
const POST: &str = "POST";
const DELETE: &str = "DELETE";

pub(super) static ROUTES: &[Route] = &[
    route(POST, "/v1/videos", Fields, Video, "Queues a video."),
    asks(
        route(GET, "/v1/videos", Nothing, Videos, "Lists the caller's videos."),
        &["after", "limit", "order", "status"],
    ),
    route(POST, "/v1/videos/sync", Fields, Media, "Generates a video and returns it in the response."),
    route(POST, "/v1/videos/generations", Fields, Media, "Alias of /v1/videos/sync, for TensorRT-LLM clients."),
    route(POST, "/v1/videos/edits", Fields, Video, "Queues an edit, which regenerates a time span of a video."),
    route(POST, "/v1/videos/extensions", Fields, Video, "Queues an extension of a video."),
    route(POST, "/v1/videos/characters", Fields, Refusal, "Not supported."),
    route(GET, "/v1/videos/{id}", Nothing, Video, "Returns a video."),
    route(DELETE, "/v1/videos/{id}", Nothing, Deleted, "Cancels a video and removes its files."),
    route(POST, "/v1/videos/{id}/cancel", Nothing, Video, "Cancels a video and keeps its record."),
    route(
        POST,
        "/v1/videos/{id}/remix",
        Fields,
        Video,
        "Repeats the request of a finished video with changed fields. Its frames are not used as input.",
    ),
    asks(route(GET, "/v1/videos/{id}/content", Nothing, Media, "Downloads a file of a finished video."), &["variant"]),
    asks(
        route(
            GET,
            "/v1/videos/{id}/events",
            Nothing,
            Events,
            "Streams a video's state and progress as server-sent events.",
        ),
        &["previews"],
    ),
    route(GET, "/v1/queue", Nothing, Queue, "Returns the caller's running and queued videos."),
    asks(
        route(
            GET,
            "/v1/queue/events",
            Nothing,
            Events,
            "Streams changes of the caller's queue and videos as server-sent events.",
        ),
        &["previews"],
    ),
    route(GET, "/v1/models", Nothing, Models, "Lists the model's names, each with its request fields and limits."),
    route(GET, "/v1/models/{model}", Nothing, Model, "Returns the model by one of its names."),
    route(GET, "/v1/list_loras", Nothing, Adapters, "Lists the LoRAs that requests may use."),
    route(POST, "/v1/set_lora", Fields, Refusal, "Not supported: LoRAs are selected per request."),
    route(POST, "/v1/merge_lora_weights", Fields, Refusal, "Not supported: LoRAs are selected per request."),
    route(POST, "/v1/unmerge_lora_weights", Fields, Refusal, "Not supported: LoRAs are selected per request."),
    route(GET, "/live", Nothing, Json, "Liveness: whether the server answers HTTP."),
    route(GET, "/health", Nothing, Json, "Health: whether the model is warm and the device makes progress."),
    route(GET, "/ready", Nothing, Json, "Readiness: healthy and not shutting down."),
    route(GET, "/metrics", Nothing, Text, "Prometheus metrics."),
    route(GET, "/version", Nothing, Json, "Returns the version, platform and model."),
    route(GET, "/openapi.json", Nothing, Json, "Returns this document."),
    route(GET, "/", Nothing, Html, "The web page."),
    route(POST, "/session", Nothing, Json, "Exchanges an API key for the web page's session cookie."),
];
