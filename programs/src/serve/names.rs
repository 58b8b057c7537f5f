//! Names of the served model: in answers, in `/v1/models`, and in requests.

use std::sync::Arc;

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{
    answer::now_s,
    fields::{Fields, must_be},
    refusal::Refusal,
};

/// Names of the only model. Answers carry the first, and requests may have any.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    names: Arc<[String]>,
    created_s: u64,
}

impl Names {
    /// Creates the names; at least one.
    pub fn new(names: Vec<String>) -> Self {
        assert!(!names.is_empty(), "a model has a name");
        Self { names: names.into(), created_s: now_s() }
    }

    /// Name in answers.
    pub fn first(&self) -> &str {
        &self.names[0]
    }

    /// Takes the field `model` of a request. Without the field a request is for the only model.
    pub(super) fn check(&self, fields: &mut Fields) -> Result<(), Refusal> {
        match fields.0.remove("model") {
            None | Some(Value::Null) => Ok(()),
            Some(Value::String(name)) if self.names.contains(&name) => Ok(()),
            Some(Value::String(name)) => Err(self.unknown(&name)),
            Some(_) => Err(Refusal::bad_request(must_be("model", "a text"))),
        }
    }

    /// All names, as `/v1/models` lists them.
    pub(super) fn list(&self) -> Value {
        json!({"object": "list", "data": self.names.iter().map(|name| self.about(name)).collect::<Vec<_>>()})
    }

    /// The model of this name.
    pub(super) fn about_one(&self, name: &str) -> Response {
        match self.names.iter().any(|known| known == name) {
            true => Json(self.about(name)).into_response(),
            false => self.unknown(name).into_response(),
        }
    }

    fn about(&self, name: &str) -> Value {
        json!({"id": name, "object": "model", "created": self.created_s, "owned_by": "anyroll"})
    }

    fn unknown(&self, name: &str) -> Refusal {
        let known: Vec<String> = self.names.iter().map(|name| format!("`{name}`")).collect();
        let message = format!("The model `{name}` does not exist: {} is served", known.join(" or "));
        Refusal::new(StatusCode::NOT_FOUND, message).with_code("model_not_found").about("model")
    }
}

#[cfg(test)]
mod tests {
    use super::{super::fields::tests::fields, *};

    #[test]
    fn a_request_is_for_a_served_name_or_for_none() {
        let names = Names::new(vec!["org/model".to_owned(), "short".to_owned()]);
        let check = |body: Value| names.check(&mut fields(body)).map_err(|refusal| refusal.body());
        for body in
            [json!({}), json!({"model": null}), json!({"model": "org/model"}), json!({"model": "short"})]
        {
            assert_eq!(check(body), Ok(()));
        }
        let error = check(json!({"model": "gpt-4"})).unwrap_err();
        assert_eq!(error["error"]["code"], "model_not_found");
        assert_eq!(
            (&error["error"]["param"], &error["error"]["type"]),
            (&json!("model"), &json!("invalid_request_error"))
        );
        assert!(
            error["error"]["message"].as_str().unwrap().contains("`org/model` or `short` is served"),
            "{error}"
        );
        assert!(check(json!({"model": 1})).is_err());
        assert_eq!(names.list()["data"][1]["id"], "short");
    }
}
