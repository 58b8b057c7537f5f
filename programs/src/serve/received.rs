//! Bodies of requests: a JSON object, complete within a time.

use std::error::Error;

use axum::{
    Json,
    extract::{FromRequest, Request, rejection::JsonRejection},
    http::StatusCode,
};
use serde_json::Value;
use tokio::time::timeout;

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
        let Ok(body) = timeout(most, Json::<Value>::from_request(request, state)).await else {
            let message = format!("the body was not complete after {} s", most.as_secs_f64());
            return Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, message));
        };
        match body {
            Ok(Json(Value::Object(fields))) => Ok(Self { fields: Fields(fields), busy: connection.busy() }),
            Ok(_) => Err(Refusal::bad_request("the body must be a JSON object".to_owned())),
            Err(error) => Err(not_json(&error)),
        }
    }
}

/// Error for a body that is not JSON.
fn not_json(error: &JsonRejection) -> Refusal {
    let message = match error {
        JsonRejection::MissingJsonContentType(_) => "`Content-Type` must be application/json".to_owned(),
        JsonRejection::JsonSyntaxError(error) => {
            let mut innermost: &dyn Error = error;
            while let Some(source) = innermost.source() {
                innermost = source;
            }
            format!("the body is not JSON: {innermost}")
        }
        _ if error.status() == StatusCode::PAYLOAD_TOO_LARGE => "the body has more than 2 MB".to_owned(),
        _ => "the body cannot be read".to_owned(),
    };
    Refusal::new(error.status(), message)
}
