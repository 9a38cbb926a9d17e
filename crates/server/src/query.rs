//! Query parameters of URLs, with percent-decoding.

use super::error::ApiError;
use super::id::VideoId;
use super::job::JobState;
use super::jobs::ListQuery;

/// Default number of videos per page.
const PAGE: usize = 20;
const MAX_PAGE: usize = 100;

/// Parses and decodes the parameters of a query. Skips parameters with empty values.
///
/// # Errors
/// Returns an error for a name that is not in `known`, a repeated name, or invalid UTF-8.
pub(crate) fn parameters(query: Option<&str>, known: &[&str]) -> Result<Vec<(String, String)>, ApiError> {
    let mut found: Vec<(String, String)> = Vec::new();
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let bad = || ApiError::new(400, "invalid_value", "the query is not valid percent-encoded UTF-8");
        let (name, value) = (decode(name).ok_or_else(bad)?, decode(value).ok_or_else(bad)?);
        if !known.contains(&name.as_str()) {
            let shown: String = name.chars().filter(|c| !c.is_control()).take(64).collect();
            let message = format!("unknown query parameter '{shown}'; supported: {}", known.join(", "));
            return Err(ApiError::field("unknown_field", shown, message));
        }
        if found.iter().any(|(other, _)| *other == name) {
            let message = format!("the query parameter '{name}' occurs twice; send it once");
            return Err(ApiError::field("invalid_value", name, message));
        }
        if !value.is_empty() {
            found.push((name, value));
        }
    }
    Ok(found)
}

/// Decodes percent-encoded text; `None` if it is malformed, not UTF-8 or contains NUL.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digits = [rest.next()?, rest.next()?];
                let [high, low] = digits.map(|digit| char::from(digit).to_digit(16));
                u8::try_from(high? * 16 + low?).ok()?
            }
            other => other,
        });
    }
    String::from_utf8(bytes).ok().filter(|text| !text.contains('\0'))
}

/// Parses the query of the list endpoint.
///
/// # Errors
/// Returns an error for an unknown or repeated parameter, invalid UTF-8 or an invalid value.
pub fn list_query(query: Option<&str>) -> Result<ListQuery, ApiError> {
    let parameters = parameters(query, &["after", "limit", "order", "status"])?;
    let mut query = ListQuery { after: None, limit: PAGE, descending: true, state: None };
    for (name, value) in &parameters {
        let wrong = |why: &str| ApiError::field("invalid_value", name.clone(), format!("{name}: {why}"));
        match name.as_str() {
            "after" => {
                query.after = Some(VideoId::parse(value).ok_or_else(|| wrong("must be a video id"))?);
            }
            "limit" => {
                let limit = value.parse().ok().filter(|limit| (1..=MAX_PAGE).contains(limit));
                query.limit = limit.ok_or_else(|| wrong("must be a number from 1 to 100"))?;
            }
            "order" => {
                query.descending = match value.as_str() {
                    "desc" => true,
                    "asc" => false,
                    _ => return Err(wrong("must be asc or desc")),
                };
            }
            _ => {
                let states = [JobState::Queued, JobState::InProgress, JobState::Completed, JobState::Failed];
                let state = states.into_iter().find(|state| state.name() == value);
                let why = "must be queued, in_progress, completed or failed";
                query.state = Some(state.ok_or_else(|| wrong(why))?);
            }
        }
    }
    Ok(query)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(query: &str) -> Result<ListQuery, ApiError> {
        list_query(Some(query))
    }

    #[test]
    fn list_query_parses_its_parameters() {
        let query = read("limit=100&order=asc&status=in%5Fprogress&after=").expect("a query");
        assert_eq!((query.limit, query.descending, query.state), (100, false, Some(JobState::InProgress)));
        assert_eq!(query.after, None);
        let query = read("").expect("a query");
        assert_eq!((query.limit, query.descending, query.state), (20, true, None));
    }

    #[test]
    fn query_errors_name_the_parameter() {
        for (bad, param) in [
            ("limit=0", "limit"),
            ("limit=101", "limit"),
            ("limit=1e3", "limit"),
            ("limit=99999999999999999999999", "limit"),
            ("order=up", "order"),
            ("status=done", "status"),
            ("after=video_1", "after"),
            ("after=..%2f..", "after"),
            ("page=2", "page"),
            ("limit=1&limit=2", "limit"),
        ] {
            let error = read(bad).expect_err(bad);
            assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{bad}: {error}");
        }
        for bad in ["after=%ff", "after=%0", "after=%zz", "%00=1"] {
            assert_eq!(read(bad).expect_err(bad).status, 400);
        }
    }
}
