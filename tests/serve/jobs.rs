//! Jobs from request to video, on a scripted device.

use crate::support::needs;
use ltx2::serve::id::{Ids, VideoId};

/// A server that starts again makes ids behind those that it finds.
#[needs(nothing)]
fn ids_go_on_behind_those_of_the_last_start() {
    let first = Ids::behind(None).next().expect("an id");
    let again = Ids::behind(Some(&first)).next().expect("an id");
    assert!(again > first && VideoId::parse(again.as_str()) == Some(again));
}
