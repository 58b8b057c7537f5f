//! Bodies of requests: a JSON object, complete within a time.

use axum::{
    body::Bytes,
    extract::{FromRequest, Request},
    http::{HeaderMap, StatusCode, header::CONTENT_TYPE},
};
use serde_json::Value;
use tokio::{task::spawn_blocking, time::timeout};

use super::{
    connections::{Busy, Connection},
    fields::Fields,
    refusal::Refusal,
};

/// A request that was received completely.
pub(super) struct Received {
    pub fields: Fields,
    /// Keeps the connection open until it is dropped.
    pub busy: Busy,
}

impl<S: Send + Sync> FromRequest<S> for Received {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refusal> {
        let connection = request.extensions().get::<Connection>().cloned();
        let connection = connection.expect("each request has its connection");
        let most = connection.body_timeout();
        if !is_json(request.headers()) {
            let message = "`Content-Type` must be application/json".to_owned();
            return Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let Ok(body) = timeout(most, Bytes::from_request(request, state)).await else {
            let message = format!("the body was not complete after {} s", most.as_secs_f64());
            return Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, message));
        };
        let body = body.map_err(|error| match error.status() {
            status @ StatusCode::PAYLOAD_TOO_LARGE => {
                Refusal::new(status, "the body has more than 2 MB".to_owned())
            }
            status => Refusal::new(status, "the body cannot be read".to_owned()),
        })?;
        let busy = connection.busy();
        // A large body would hold up the thread of all connections.
        match spawn_blocking(move || serde_json::from_slice(&body)).await {
            Ok(Ok(Value::Object(fields))) => Ok(Self { fields: Fields(fields), busy }),
            Ok(Ok(_)) => Err(Refusal::bad_request("the body must be a JSON object".to_owned())),
            Ok(Err(error)) => Err(Refusal::bad_request(format!("the body is not JSON: {error}"))),
            Err(_) => Err(Refusal::failed("the body could not be read".to_owned())),
        }
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}
