//! HTTP of stores over ureq, which the endpoints of rewards use too: one client, and one implementation of TLS.

use std::{future::poll_fn, io, pin::Pin, time::Duration};

use async_trait::async_trait;
use hyper::body::Body;
use object_store::{
    ClientOptions,
    client::{
        HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse,
        HttpResponseBody, HttpService,
    },
};
use ureq::{Agent, http::Request};

/// Most time until a connection is made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Makes clients whose requests end within a time.
#[derive(Debug)]
pub(super) struct Connector {
    pub timeout: Duration,
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECT_TIMEOUT.min(self.timeout)))
            .timeout_global(Some(self.timeout))
            .build();
        Ok(HttpClient::new(Client(config.into())))
    }
}

#[derive(Debug)]
struct Client(Agent);

#[async_trait]
impl HttpService for Client {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (parts, body) = request.into_parts();
        let request = Request::from_parts(parts, bytes_of(body).await?);
        let agent = self.0.clone();
        // A thread of its own, so that the parts of a file travel together.
        let answer = tokio::task::spawn_blocking(move || send(&agent, request)).await;
        answer.map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?
    }
}

fn send(agent: &Agent, request: Request<Vec<u8>>) -> Result<HttpResponse, HttpError> {
    let (parts, mut body) = agent.run(request).map_err(failure)?.into_parts();
    // A store sends what was asked for, in pieces that were asked for.
    let bytes = body.with_config().limit(u64::MAX).read_to_vec().map_err(failure)?;
    Ok(HttpResponse::from_parts(parts, HttpResponseBody::from(bytes)))
}

async fn bytes_of(mut body: HttpRequestBody) -> Result<Vec<u8>, HttpError> {
    let mut bytes = Vec::with_capacity(body.content_length());
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        if let Ok(data) = frame?.into_data() {
            bytes.extend_from_slice(&data);
        }
    }
    Ok(bytes)
}

/// Kinds decide if a request is tried again.
fn failure(error: ureq::Error) -> HttpError {
    let kind = match &error {
        ureq::Error::Timeout(_) => HttpErrorKind::Timeout,
        ureq::Error::HostNotFound | ureq::Error::ConnectionFailed => HttpErrorKind::Connect,
        ureq::Error::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => HttpErrorKind::Connect,
        ureq::Error::Io(_) => HttpErrorKind::Interrupted,
        _ => HttpErrorKind::Unknown,
    };
    HttpError::new(kind, error)
}
