//! Error responses in the format of OpenAI's API.

use anyroll_config::error_chain::one_line;
use anyroll_data::TokenizerError;
use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

/// An error response.
#[derive(Debug)]
pub(super) struct Refusal {
    status: StatusCode,
    message: String,
    /// OpenAI's word for the error, if there is one.
    code: Option<&'static str>,
    /// The field that is to blame, if it is known.
    field: Option<&'static str>,
}

impl Refusal {
    pub fn new(status: StatusCode, message: String) -> Self {
        Self { status, message, code: None, field: None }
    }

    pub fn bad_request(message: String) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// An error that the request is not to blame for.
    pub fn failed(message: String) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// The error with OpenAI's word for it.
    pub fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// The error with the field that is to blame.
    pub fn about(self, field: &'static str) -> Self {
        Self { field: Some(field), ..self }
    }

    pub fn body(&self) -> Value {
        let kind = if self.status.is_server_error() { "server_error" } else { "invalid_request_error" };
        json!({"error": {"message": self.message, "type": kind, "param": self.field, "code": self.code}})
    }
}

/// Reason why a text or a conversation has no tokens, without the paths of this machine.
pub(super) fn untokenized(error: &TokenizerError) -> String {
    match error {
        TokenizerError::NoTemplate { .. } => "the model has no chat template: use /v1/completions".to_owned(),
        TokenizerError::Template { source, .. } => {
            format!("the chat template refuses the messages: {}", one_line(source))
        }
        TokenizerError::Character(error) => one_line(error),
        TokenizerError::Messages { .. } => "messages need a model with a chat template".to_owned(),
        _ => "the model's tokenizer fails on it".to_owned(),
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status, Json(self.body())).into_response()
    }
}
