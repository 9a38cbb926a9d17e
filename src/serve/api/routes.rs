//! The table of routes: what the router answers, and what the OpenAPI document says.

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware::from_fn_with_state;
use axum::routing::{MethodRouter, delete, get, post};
use tower_http::catch_panic::CatchPanicLayer;

use super::{App, content, create, errors, events, guard, lora, models, openapi, page, probes, sync, videos};

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

/// The handler of an endpoint.
fn handler(route: &Route) -> MethodRouter<Arc<App>> {
    match (route.method, route.path) {
        ("POST", "/v1/videos") => post(create::create),
        ("GET", "/v1/videos") => get(videos::list),
        ("POST", "/v1/videos/sync" | "/v1/videos/generations") => post(sync::sync),
        ("POST", "/v1/videos/edits") => post(create::edit),
        ("POST", "/v1/videos/extensions") => post(create::extend),
        ("GET", "/v1/videos/{id}") => get(videos::get),
        ("DELETE", _) => delete(videos::delete),
        (_, "/v1/videos/{id}/cancel") => post(videos::cancel),
        (_, "/v1/videos/{id}/remix") => post(create::remix),
        (_, "/v1/videos/{id}/content") => get(content::content),
        (_, "/v1/videos/{id}/events") => get(events::of_video),
        (_, "/v1/queue") => get(videos::queue),
        (_, "/v1/queue/events") => get(events::of_queue),
        (_, "/v1/models") => get(models::list),
        (_, "/v1/models/{model}") => get(models::get),
        (_, "/v1/list_loras") => get(lora::list),
        (_, "/v1/set_lora" | "/v1/merge_lora_weights" | "/v1/unmerge_lora_weights") => post(lora::refuse),
        (_, "/live") => get(probes::live),
        (_, "/health") => get(probes::health),
        (_, "/ready") => get(probes::ready),
        (_, "/metrics") => get(probes::metrics),
        (_, "/version") => get(probes::version),
        (_, "/openapi.json") => get(openapi::document),
        (_, "/") => get(page::page),
        (_, "/session") => post(page::session),
        _ => post(errors::unsupported),
    }
}

/// The router over all endpoints, with what every request passes.
///
/// # Errors
/// Origins that are none.
pub(in crate::serve) fn router(app: Arc<App>) -> Result<Router, String> {
    let origins = app.serve.cors_origin.clone();
    let mut router = Router::new();
    for route in ROUTES {
        router = router.route(route.path, handler(route));
    }
    let router = router
        .fallback(errors::no_route)
        .method_not_allowed_fallback(errors::no_method)
        .with_state(Arc::clone(&app))
        // Bodies have limits of their own.
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn_with_state(Arc::clone(&app), guard::key))
        .layer(guard::csrf(&origins)?);
    let router = match guard::cors(&origins)? {
        Some(cors) => router.layer(cors),
        None => router,
    };
    Ok(router
        .layer(from_fn_with_state(Arc::clone(&app), guard::host))
        .layer(CatchPanicLayer::custom(errors::panicked))
        .layer(from_fn_with_state(app, guard::note)))
}

/// The router of an address that has figures alone.
pub(in crate::serve) fn metrics_router(app: Arc<App>) -> Router {
    Router::new().route("/metrics", get(probes::metrics)).fallback(errors::no_route).with_state(app)
}
