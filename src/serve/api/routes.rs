//! The table of routes, of which router and OpenAPI document are made.

/// Contents of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    Nothing,
    /// The fields of a request to make a video, as JSON or as a form.
    Fields,
}

/// Contents of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gives {
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
    /// An error alone.
    Refusal,
}

/// An endpoint, as router and document know it.
pub(super) struct Route {
    pub(super) path: &'static str,
    pub(super) method: &'static str,
    pub(super) summary: &'static str,
    pub(super) takes: Takes,
    pub(super) gives: Gives,
    /// Names of what its query may say.
    pub(super) query: &'static [&'static str],
}

const fn route(method: &'static str, path: &'static str, takes: Takes, gives: Gives, summary: &'static str) -> Route {
    Route { path, method, summary, takes, gives, query: &[] }
}

const fn asks(route: Route, query: &'static [&'static str]) -> Route {
    Route { query, ..route }
}

use Gives::{Adapters, Deleted, Events, Html, Json, Media, Model, Models, Queue, Refusal, Text, Video, Videos};
use Takes::{Fields, Nothing};

const GET: &str = "GET";
const POST: &str = "POST";
const DELETE: &str = "DELETE";

/// All endpoints.
pub(super) static ROUTES: &[Route] = &[
    route(POST, "/v1/videos", Fields, Video, "Takes a video into the queue."),
    asks(route(GET, "/v1/videos", Nothing, Videos, "The caller's videos."), &["after", "limit", "order", "status"]),
    route(POST, "/v1/videos/sync", Fields, Media, "Makes a video and waits for it."),
    route(POST, "/v1/videos/generations", Fields, Media, "The same; TensorRT-LLM's example asks here."),
    route(POST, "/v1/videos/edits", Fields, Video, "Makes a span of a video anew."),
    route(POST, "/v1/videos/extensions", Fields, Video, "Goes on with a video."),
    route(POST, "/v1/videos/characters", Fields, Refusal, "No model here is for it."),
    route(GET, "/v1/videos/{id}", Nothing, Video, "A video."),
    route(DELETE, "/v1/videos/{id}", Nothing, Deleted, "Cancels a video and removes its files."),
    route(POST, "/v1/videos/{id}/cancel", Nothing, Video, "Cancels a video and keeps its record."),
    route(
        POST,
        "/v1/videos/{id}/remix",
        Fields,
        Video,
        "The request of a finished video again, with other fields: its frames are no input.",
    ),
    asks(route(GET, "/v1/videos/{id}/content", Nothing, Media, "A file of a finished video."), &["variant"]),
    route(GET, "/v1/videos/{id}/events", Nothing, Events, "A video's states and progress as they come."),
    route(GET, "/v1/queue", Nothing, Queue, "The caller's running and waiting videos."),
    route(GET, "/v1/queue/events", Nothing, Events, "The same as it changes."),
    route(GET, "/v1/models", Nothing, Models, "The model, with what it can be asked for."),
    route(GET, "/v1/models/{model}", Nothing, Model, "The same by a name of it."),
    route(GET, "/v1/list_loras", Nothing, Adapters, "LoRAs that requests may name."),
    route(POST, "/v1/set_lora", Fields, Refusal, "LoRAs belong to requests here."),
    route(POST, "/v1/merge_lora_weights", Fields, Refusal, "LoRAs belong to requests here."),
    route(POST, "/v1/unmerge_lora_weights", Fields, Refusal, "LoRAs belong to requests here."),
    route(GET, "/live", Nothing, Json, "Whether HTTP answers."),
    route(GET, "/health", Nothing, Json, "Whether the model is warm and its device moves."),
    route(GET, "/ready", Nothing, Json, "The same, and whether videos are taken."),
    route(GET, "/metrics", Nothing, Text, "Figures for Prometheus."),
    route(GET, "/version", Nothing, Json, "Release, platform and model."),
    route(GET, "/openapi.json", Nothing, Json, "This document."),
    route(GET, "/", Nothing, Html, "The page."),
    route(POST, "/session", Nothing, Json, "Trades a key for the page's cookie."),
];
