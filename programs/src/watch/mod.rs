//! HTTP server of the page of runs, for `anyroll watch`.
//!
//! `runs` reads the runs' files a few times a second. Each open page has a stream of events, and gets the changes since
//! its last event. Requests pass the checks of [`Access`], as those of `anyroll serve` do.

mod runs;

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyroll_pipelines::{Error, Result, page::Page};
use axum::{
    Extension, Router,
    extract::State,
    http::{
        StatusCode, Uri,
        header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, X_CONTENT_TYPE_OPTIONS},
    },
    response::{
        Html, IntoResponse,
        sse::{Event, KeepAlive, Sse},
    },
    routing::get,
};
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
    time::{MissedTickBehavior, interval, timeout},
};
use tokio_stream::wrappers::ReceiverStream;

pub(crate) use runs::Runs;

use crate::serve::{Access, Connection, Connections, Limits, stop_by_signal};

/// Time between two looks at the files.
const INTERVAL: Duration = Duration::from_millis(500);
/// Time for open pages to be told of the end.
const GRACE: Duration = Duration::from_secs(2);
const LIMITS: Limits =
    Limits { header: Duration::from_secs(10), body: Duration::from_secs(10), connections: 256 };

/// Runs that all pages share.
#[derive(Clone)]
struct App {
    runs: Arc<Mutex<Runs>>,
    /// Number of changes so far.
    changes: watch::Receiver<u64>,
    stopped: watch::Receiver<bool>,
}

impl App {
    fn runs(&self) -> MutexGuard<'_, Runs> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves the page of `runs` until a signal. `ready` gets the address and the number of runs.
///
/// # Errors
/// An address that cannot be listened on.
pub(crate) fn watch(
    mut runs: Runs,
    address: SocketAddr,
    access: Access,
    ready: impl FnOnce(SocketAddr, usize),
) -> Result<()> {
    let (stop, stopped) = watch::channel(false);
    let (change, changes) = watch::channel(0);
    stop_by_signal(stop)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::Serve)?;
    let served = runtime.block_on(async {
        let listener =
            TcpListener::bind(address).await.map_err(|source| Error::Listen { address, source })?;
        let own = listener.local_addr().map_err(Error::Serve)?;
        runs.poll();
        let count = runs.count();
        let app = App { runs: Arc::new(Mutex::new(runs)), changes, stopped: stopped.clone() };
        let reader = tokio::spawn(read(app.clone(), change));
        let connections = Connections::new(LIMITS).map_err(Error::Serve)?;
        ready(own, count);
        let (mut to_stop, mut stopped) = (stopped.clone(), stopped);
        let stop = async move {
            let _ = to_stop.wait_for(|stop| *stop).await;
        };
        let server = tokio::spawn(connections.serve(listener, access.guard(router(app)), stop));
        let _ = stopped.wait_for(|stop| *stop).await;
        reader.abort();
        // A page that does not read its events is left.
        let _ = timeout(GRACE, server).await;
        Ok(())
    });
    runtime.shutdown_timeout(GRACE);
    served
}

/// Reads the runs' files again and again.
async fn read(app: App, change: watch::Sender<u64>) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let reads = app.clone();
        // A large log takes a while, in which other requests are answered.
        match tokio::task::spawn_blocking(move || reads.runs().poll()).await {
            Ok(true) => change.send_modify(|count| *count += 1),
            Ok(false) => {}
            Err(error) => tracing::error!("the runs could not be read: {error}"),
        }
    }
}

fn router(app: App) -> Router {
    Router::new().route("/", get(page)).route("/events", get(events)).with_state(app).fallback(
        |uri: Uri| async move {
            (StatusCode::NOT_FOUND, format!("unknown path {}: the page is at /\n", uri.path()))
        },
    )
}

async fn page() -> impl IntoResponse {
    let headers = [
        (CACHE_CONTROL, "no-store"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // The page's own policy, which cannot forbid frames.
        (CONTENT_SECURITY_POLICY, "frame-ancestors 'none'"),
    ];
    (headers, Html(Page::Live.html()))
}

async fn events(State(app): State<App>, Extension(connection): Extension<Connection>) -> impl IntoResponse {
    let (to_page, events) = mpsc::channel::<Result<Event, Infallible>>(1);
    tokio::spawn(async move {
        let _busy = connection.busy();
        tell(app, to_page).await;
    });
    ([(CACHE_CONTROL, "no-store")], Sse::new(ReceiverStream::new(events)).keep_alive(KeepAlive::default()))
}

/// Sends a page all runs, and then each change, until the page is closed or the server ends.
async fn tell(mut app: App, to_page: mpsc::Sender<Result<Event, Infallible>>) {
    let mut cursors = Vec::new();
    let mut problems = Vec::new();
    loop {
        app.changes.mark_unchanged();
        let count = app.runs().count();
        cursors.resize_with(count, Default::default);
        for (index, cursor) in cursors.iter_mut().enumerate() {
            let news = app.runs().news(index, cursor);
            if let Some(news) = news
                && to_page.send(Ok(Event::default().event("run").data(news))).await.is_err()
            {
                return;
            }
        }
        let present = app.runs().problems();
        if present != problems {
            let told = serde_json::to_string(&present).expect("texts are plain values");
            if to_page.send(Ok(Event::default().event("problems").data(told))).await.is_err() {
                return;
            }
            problems = present;
        }
        tokio::select! {
            changed = app.changes.changed() => if changed.is_err() { return },
            _ = app.stopped.wait_for(|stop| *stop) => return,
            () = to_page.closed() => return,
        }
    }
}
