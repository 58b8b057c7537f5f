//! The `metrics` section: the publication of a run's metrics while the run continues.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// Publication of the metrics while the run continues.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsConfig {
    /// Address of the Prometheus endpoint `/metrics` on rank 0's host: a port of the loopback interface, such as
    /// `9400`, or an address, such as `0.0.0.0:9400`. Default: no endpoint.
    pub prometheus: Option<Listen>,
}

/// An address to listen on, written as a port or as `ADDRESS:PORT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Listen(pub SocketAddr);

impl<'de> Deserialize<'de> for Listen {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListenVisitor;

        impl Visitor<'_> for ListenVisitor {
            type Value = Listen;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a port such as 9400, or an address with one such as `0.0.0.0:9400`")
            }

            fn visit_u64<E: de::Error>(self, port: u64) -> Result<Listen, E> {
                match u16::try_from(port) {
                    Ok(port) if port > 0 => Ok(Listen((Ipv4Addr::LOCALHOST, port).into())),
                    _ => Err(E::invalid_value(de::Unexpected::Unsigned(port), &self)),
                }
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Listen, E> {
                match text.parse::<SocketAddr>() {
                    Ok(address) if address.port() > 0 => Ok(Listen(address)),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }
        }

        deserializer.deserialize_any(ListenVisitor)
    }
}
