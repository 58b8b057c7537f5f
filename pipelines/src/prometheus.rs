//! Exporter of a run's latest metrics to Prometheus, enabled by `metrics: {prometheus: 9400}`.

use std::{
    fmt::Write,
    io,
    net::{SocketAddr, TcpListener},
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use axum::{Router, extract::State, http::header, response::IntoResponse, routing::get};

use crate::metrics::Metrics;

/// Content type of the Prometheus text format.
const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// HTTP server of the metrics page, which lives as long as the process.
#[derive(Debug)]
pub struct Prometheus {
    run: String,
    address: SocketAddr,
    latest: Metrics,
    page: Arc<Mutex<String>>,
}

impl Prometheus {
    /// Serves `/metrics` of `run` at `address` on its own thread.
    ///
    /// # Errors
    /// An address that cannot be listened on.
    pub fn start(address: SocketAddr, run: &str) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let page = Arc::<Mutex<String>>::default();
        let router = Router::new().route("/metrics", get(answer)).with_state(page.clone());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        thread::Builder::new().name("prometheus".into()).spawn(move || {
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener)?;
                axum::serve(listener, router).await
            })
        })?;
        Ok(Self { run: run.to_owned(), address, latest: Metrics::new(), page })
    }

    /// Address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Publishes a step's metrics; metrics absent from this step keep their last value.
    pub fn show(&mut self, step: u64, metrics: &Metrics) {
        self.latest.merge(metrics.clone());
        let text = text(&self.run, step, &self.latest);
        *self.page.lock().unwrap_or_else(PoisonError::into_inner) = text;
    }
}

async fn answer(State(page): State<Arc<Mutex<String>>>) -> impl IntoResponse {
    let page = page.lock().unwrap_or_else(PoisonError::into_inner).clone();
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], page)
}

/// Text of the page. `reward/mean` becomes `anyroll_reward_mean{run="..."}`, since names may contain only
/// letters, digits and `_`.
fn text(run: &str, step: u64, metrics: &Metrics) -> String {
    let run = run.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let mut page = String::new();
    for (name, value) in [("step", step as f64)].into_iter().chain(metrics.iter()) {
        let name: String = name.chars().map(|it| if it.is_ascii_alphanumeric() { it } else { '_' }).collect();
        let value = match value {
            value if value.is_nan() => "NaN".to_owned(),
            value if value.is_infinite() => if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned(),
            value => value.to_string(),
        };
        writeln!(page, "# TYPE anyroll_{name} gauge\nanyroll_{name}{{run=\"{run}\"}} {value}")
            .expect("a string takes all that is written");
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(pairs: &[(&str, f64)]) -> Metrics {
        let mut metrics = Metrics::new();
        pairs.iter().for_each(|(name, value)| metrics.insert(*name, *value));
        metrics
    }

    #[test]
    fn the_page_has_the_latest_value_of_each_metric() {
        let mut own = Prometheus::start(([127, 0, 0, 1], 0).into(), "sort \"6\"").unwrap();
        let url = format!("http://{}/metrics", own.address());
        let read = || {
            let mut response = ureq::get(&url).call().unwrap();
            let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
            assert_eq!(kind, CONTENT_TYPE);
            response.body_mut().read_to_string().unwrap()
        };
        assert_eq!(read(), "");
        own.show(1, &metrics(&[("eval/pass@1", 0.25), ("grad_norm", f64::NAN)]));
        own.show(2, &metrics(&[("grad_norm", f64::INFINITY)]));
        let expected = "\
# TYPE anyroll_step gauge
anyroll_step{run=\"sort \\\"6\\\"\"} 2
# TYPE anyroll_eval_pass_1 gauge
anyroll_eval_pass_1{run=\"sort \\\"6\\\"\"} 0.25
# TYPE anyroll_grad_norm gauge
anyroll_grad_norm{run=\"sort \\\"6\\\"\"} +Inf
";
        assert_eq!(read(), expected);
        assert!(Prometheus::start(own.address(), "other").is_err(), "two listen at one address");
    }
}
