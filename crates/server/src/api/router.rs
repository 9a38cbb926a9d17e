//! The router, which has a handler for each row of the route table, and its middleware.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware::from_fn_with_state;
use axum::routing::{MethodRouter, delete, get, post};
use tower_http::catch_panic::CatchPanicLayer;

use super::routes::{ROUTES, Route};
use super::{App, content, create, errors, events, guard, lora, models, openapi, page, probes, sync, videos};

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

/// Builds the router with all endpoints and middleware.
///
/// # Errors
/// Returns an error if an origin in `serve.cors_origin` is invalid.
pub(crate) fn router(app: Arc<App>) -> Result<Router, String> {
    let origins = app.settings.cors_origin.clone();
    let mut router = Router::new();
    for route in ROUTES {
        router = router.route(route.path, handler(route));
    }
    let router = router
        .fallback(errors::no_route)
        .method_not_allowed_fallback(errors::no_method)
        .with_state(Arc::clone(&app))
        // `ExchangeState` enforces the size limit of request bodies.
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn_with_state(Arc::clone(&app), guard::key))
        .layer(guard::csrf(&origins)?);
    let router = match guard::cors(&origins)? {
        Some(cors) => router.layer(cors),
        None => router,
    };
    let bound = app.bound;
    Ok(outermost(router, app, bound))
}

/// Adds the outermost layers, which both listeners share: access log, panic handler and host check.
fn outermost(router: Router, app: Arc<App>, bound: SocketAddr) -> Router {
    router
        .layer(from_fn_with_state((Arc::clone(&app), bound.ip()), guard::host))
        .layer(CatchPanicLayer::custom(errors::panicked))
        .layer(from_fn_with_state(app, guard::note))
}

/// Builds the router of the metrics listener, with the same checks of API keys and hosts as the main router.
pub(crate) fn metrics_router(app: Arc<App>, bound: SocketAddr) -> Router {
    let router = Router::new()
        .route("/metrics", get(probes::metrics))
        .fallback(errors::no_route)
        .method_not_allowed_fallback(errors::no_method)
        .with_state(Arc::clone(&app))
        .layer(from_fn_with_state(Arc::clone(&app), guard::key));
    outermost(router, app, bound)
}
