//! Access to the server: its key, the hosts by whose name it may be asked, and the origins of pages that may ask it.
//!
//! A page in a browser may reach a server on the loopback interface, by another site's name even (DNS rebinding). Its
//! requests have a foreign `Host` or `Origin`, and are refused unless they are expected.

use std::{net::IpAddr, str::FromStr, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    http::{
        HeaderMap, HeaderValue, Method, StatusCode, Uri,
        header::{AUTHORIZATION, HOST, ORIGIN},
        uri::Authority,
    },
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
};
use subtle::ConstantTimeEq;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::refusal::Refusal;

/// The path that needs no key.
const OPEN_PATH: &str = "/health";

/// Which requests are answered.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    /// Key that clients send, if they need one.
    pub key: Option<Key>,
    /// Names of the server besides the loopback ones and its address.
    pub hosts: Vec<Host>,
    /// Origins whose pages may ask.
    pub origins: Vec<Origin>,
    /// Address that is listened on.
    pub bound: IpAddr,
}

/// Key of the server.
#[derive(Clone)]
pub(crate) struct Key(String);

/// Name of a host, in lower case and without a port; `*` for all.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Host(String);

/// Origin of pages, such as `http://localhost:3000`; `*` for all.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Origin(HeaderValue);

impl FromStr for Key {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(Self(text.to_owned())),
            false => Err("write ASCII characters without spaces, at least one".to_owned()),
        }
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl FromStr for Host {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "*" => Ok(Self(text.to_owned())),
            _ => Self::of(text).ok_or_else(|| "write a name such as `my.server`, or `*` for all".to_owned()),
        }
    }
}

impl Host {
    /// Host of a `Host` header.
    fn of(header: &str) -> Option<Self> {
        let authority = Authority::from_str(header).ok().filter(|it| !it.as_str().contains('@'))?;
        let name = authority.host().to_ascii_lowercase();
        Some(Self(name.strip_suffix('.').map_or(name.clone(), str::to_owned)))
    }

    /// Address that is written in place of a name.
    fn address(&self) -> Option<IpAddr> {
        self.0.trim_start_matches('[').trim_end_matches(']').parse().ok()
    }
}

impl FromStr for Origin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let lower = text.to_ascii_lowercase();
        let is_origin = text == "*"
            || lower.split_once("://").is_some_and(|(scheme, authority)| {
                !scheme.is_empty() && Authority::from_str(authority).is_ok()
            });
        let value = HeaderValue::from_str(&lower).ok().filter(|_| is_origin);
        value
            .map(Self)
            .ok_or_else(|| "write an origin such as `http://localhost:3000`, or `*` for all".to_owned())
    }
}

impl Access {
    /// Routes of `router` for requests with access.
    pub(crate) fn guard(self, router: Router) -> Router {
        let (cors, access) = (self.cors(), Arc::new(self));
        let router = router.layer(from_fn_with_state(access.clone(), with_key));
        let router = match cors {
            Some(cors) => router.layer(cors),
            None => router,
        };
        router.layer(from_fn_with_state(access, from_expected))
    }

    /// Headers for pages of other origins, and answers to what browsers ask beforehand; `None` without such origins.
    fn cors(&self) -> Option<CorsLayer> {
        const REMEMBERED: Duration = Duration::from_secs(600);
        let origins: Vec<HeaderValue> = self.origins.iter().map(|origin| origin.0.clone()).collect();
        let allowed = match origins.iter().any(|origin| origin == "*") {
            true => AllowOrigin::any(),
            false => AllowOrigin::list(origins),
        };
        let cors = CorsLayer::new().allow_origin(allowed).allow_methods([Method::GET, Method::POST]);
        let cors = cors.allow_headers(AllowHeaders::mirror_request()).max_age(REMEMBERED);
        Some(cors).filter(|_| !self.origins.is_empty())
    }

    fn refuse_source(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), Refusal> {
        let forbidden = |message| Err(Refusal::new(StatusCode::FORBIDDEN, message));
        let named = headers.get_all(HOST).iter().map(|host| host.to_str().unwrap_or_default());
        for host in named.chain(uri.authority().map(Authority::as_str)) {
            if !Host::of(host).is_some_and(|host| self.is_host(&host)) {
                let host: String = host.chars().take(100).collect();
                return forbidden(format!(
                    "the host `{host}` is not this server's: start it with `--allowed-hosts {host}`, or ask by its address"
                ));
            }
        }
        let host = headers.get(HOST).and_then(|host| host.to_str().ok());
        for origin in headers.get_all(ORIGIN) {
            let origin = origin.to_str().unwrap_or_default().to_ascii_lowercase();
            let of_server = origin.split_once("://").map(|(_, authority)| authority);
            let is_own = host.is_some_and(|host| of_server.is_some_and(|it| it.eq_ignore_ascii_case(host)));
            let is_allowed = self.origins.iter().any(|allowed| allowed.0 == "*" || allowed.0 == origin);
            if !is_own && !is_allowed {
                let origin: String = origin.chars().take(100).collect();
                return forbidden(format!(
                    "pages of `{origin}` may not ask this server: start it with `--allowed-origins {origin}`"
                ));
            }
        }
        Ok(())
    }

    fn is_host(&self, host: &Host) -> bool {
        let is_address = |address: IpAddr| {
            // An address as a host is no other site's name. Bound to all, the server has any of this machine.
            address.is_loopback() || address == self.bound || self.bound.is_unspecified()
        };
        host.0 == "localhost"
            || host.address().is_some_and(is_address)
            || self.hosts.iter().any(|allowed| allowed.0 == "*" || allowed == host)
    }

    fn refuse_key(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(Key(key)) = &self.key else { return Ok(()) };
        let sent = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let sent = sent.and_then(|value| value.split_once(' '));
        let message = match sent.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")) {
            Some((_, sent)) if bool::from(sent.trim().as_bytes().ct_eq(key.as_bytes())) => return Ok(()),
            Some(_) => "the API key is not the server's",
            None => "the API key is missing: send the header `Authorization: Bearer KEY`",
        };
        Err(Refusal::new(StatusCode::UNAUTHORIZED, message.to_owned()).with_code("invalid_api_key"))
    }
}

async fn from_expected(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    match access.refuse_source(request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

async fn with_key(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    if request.uri().path() == OPEN_PATH {
        return next.run(request).await;
    }
    match access.refuse_key(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(bound: &str, hosts: &[&str], origins: &[&str]) -> Access {
        Access {
            key: Some("secret".parse().unwrap()),
            hosts: hosts.iter().map(|host| host.parse().unwrap()).collect(),
            origins: origins.iter().map(|origin| origin.parse().unwrap()).collect(),
            bound: bound.parse().unwrap(),
        }
    }

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        pairs.collect()
    }

    #[test]
    fn hosts_are_the_loopback_ones_the_bound_one_and_those_allowed() {
        let local = access("127.0.0.1", &["My.Server"], &[]);
        let is_refused = |access: &Access, host: &str| {
            access.refuse_source(&"/".parse().unwrap(), &headers(&[("host", host)])).is_err()
        };
        for host in [
            "localhost",
            "LOCALHOST:80",
            "localhost.",
            "127.0.0.1:8000",
            "127.0.0.2",
            "[::1]:8000",
            "my.server:1",
        ] {
            assert!(!is_refused(&local, host), "{host}");
        }
        for host in
            ["evil.example", "localhost.evil.example", "10.0.0.1", "a@localhost", "", "my.server.b", "[::2]"]
        {
            assert!(is_refused(&local, host), "{host}");
        }
        let wide = access("0.0.0.0", &[], &[]);
        assert!(!is_refused(&wide, "10.0.0.1:8000") && is_refused(&wide, "evil.example"));
        let one = access("10.0.0.1", &[], &[]);
        assert!(!is_refused(&one, "10.0.0.1") && is_refused(&one, "10.0.0.2"));
        assert!(!is_refused(&access("127.0.0.1", &["*"], &[]), "evil.example"));
        // The host in the address of the request counts as well.
        let absolute = "http://evil.example/v1/models".parse().unwrap();
        assert!(local.refuse_source(&absolute, &headers(&[("host", "localhost")])).is_err());
        assert!(local.refuse_source(&"/".parse().unwrap(), &headers(&[])).is_ok());
    }

    #[test]
    fn origins_are_the_servers_own_and_those_allowed() {
        let is_refused = |origins: &[&str], origin: &str| {
            let headers = headers(&[("host", "localhost:8000"), ("origin", origin)]);
            access("127.0.0.1", &[], origins).refuse_source(&"/".parse().unwrap(), &headers).is_err()
        };
        assert!(!is_refused(&[], "http://localhost:8000"));
        for foreign in ["http://localhost:3000", "http://evil.example", "null", "localhost:8000"] {
            assert!(is_refused(&[], foreign), "{foreign}");
            assert!(!is_refused(&["*"], foreign), "{foreign}");
        }
        assert!(!is_refused(&["http://LocalHost:3000"], "http://localhost:3000"));
        assert!(is_refused(&["http://localhost:3000"], "https://localhost:3000"));
        for wrong in ["localhost:3000", "http://", "http://a/b", ""] {
            assert!(wrong.parse::<Origin>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_key_is_compared_as_a_whole() {
        let access = access("127.0.0.1", &[], &[]);
        let is_refused = |value: &str| access.refuse_key(&headers(&[("authorization", value)])).is_err();
        assert!(!is_refused("Bearer secret") && !is_refused("bearer  secret"));
        for wrong in
            ["Bearer", "Bearer ", "Bearer secre", "Bearer secrets", "Bearer Secret", "Basic secret", "secret"]
        {
            assert!(is_refused(wrong), "{wrong}");
        }
        assert!(access.refuse_key(&HeaderMap::new()).is_err());
        for wrong in ["", "two words", "é"] {
            assert!(wrong.parse::<Key>().is_err(), "{wrong}");
        }
    }
}
