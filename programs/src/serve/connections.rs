//! Connections of clients: a bounded number, each with a time for the header of its next request.
//!
//! A connection is idle unless a complete request on it is being answered. At the limit the connection that has been
//! idle longest is closed for a new one, so that clients who send nothing keep nobody out.

use std::{
    collections::HashMap,
    fs, io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::{Router, body::Body, http::Request};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
};
use nix::sys::resource::{Resource, getrlimit};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::{AbortHandle, yield_now},
    time::sleep,
};
use tower::ServiceExt;

/// Bounds on what a client may hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Time for the header of a request, from the end of the one before.
    pub header: Duration,
    /// Time for the body of a request.
    pub body: Duration,
    /// Open connections.
    pub connections: usize,
}

/// Open connections by number.
pub(crate) struct Connections {
    limits: Limits,
    open: Mutex<HashMap<u64, Open>>,
    /// Notified if a connection is closed or becomes idle.
    changed: Notify,
}

struct Open {
    /// `None` while a request is being answered.
    idle_since: Option<Instant>,
    /// Closes the connection.
    task: Option<AbortHandle>,
}

/// Connection of a request, one of the request's extensions.
#[derive(Clone)]
pub(crate) struct Connection {
    of: Arc<Connections>,
    number: u64,
}

/// Mark of a connection whose request is being answered. The connection is idle again when the mark is dropped.
pub(crate) struct Busy(Connection);

/// Place of a connection, given back when dropped.
struct Taken(Connection);

impl Connections {
    /// Opens up to `limits.connections`, fewer if the process may not open as many files.
    ///
    /// # Errors
    /// If no file is left for a connection.
    pub fn new(limits: Limits) -> io::Result<Arc<Self>> {
        /// Files that the process opens later for other purposes, and connections that are being closed.
        const RESERVE: usize = 16;
        let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE)?;
        let held = fs::read_dir("/proc/self/fd")?.count();
        let free = usize::try_from(soft).unwrap_or(usize::MAX).saturating_sub(held + RESERVE);
        if free == 0 {
            return Err(io::Error::other(format!(
                "the limit of open files is {soft}, and {held} are open: raise it, as in `ulimit -n 1024`"
            )));
        }
        let limits = Limits { connections: limits.connections.min(free), ..limits };
        Ok(Arc::new(Self { limits, open: Mutex::default(), changed: Notify::new() }))
    }

    fn open(&self) -> MutexGuard<'_, HashMap<u64, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves `router` until `stop`. The requests that are then being answered are finished.
    pub async fn serve(
        self: Arc<Self>,
        listener: TcpListener,
        router: Router,
        stop: impl Future<Output = ()>,
    ) {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(self.limits.header);
        let graceful = GracefulShutdown::new();
        tokio::pin!(stop);
        for number in 0.. {
            let (stream, taken) = tokio::select! {
                taken = self.accept(&listener, number) => taken,
                () = &mut stop => break,
            };
            let (connection, router) = (taken.0.clone(), router.clone());
            let service = service_fn(move |request: Request<Incoming>| {
                let mut request = request.map(Body::new);
                request.extensions_mut().insert(connection.clone());
                router.clone().oneshot(request)
            });
            let served = graceful.watch(http.serve_connection(TokioIo::new(stream), service));
            let task = tokio::spawn(async move {
                // Fails if the client leaves, or sends no HTTP.
                let _ = served.await;
                drop(taken);
            });
            if let Some(open) = self.open().get_mut(&number) {
                open.task = Some(task.abort_handle());
            }
        }
        drop(listener);
        graceful.shutdown().await;
    }

    /// Accepts a connection, once there is a place for it.
    async fn accept(self: &Arc<Self>, listener: &TcpListener, number: u64) -> (TcpStream, Taken) {
        /// Delay after an error, such as that of a process with too many open files.
        const RETRY: Duration = Duration::from_millis(50);
        let stream = loop {
            match listener.accept().await {
                Ok((stream, _)) => break stream,
                Err(_) => {
                    self.close_idlest();
                    sleep(RETRY).await;
                }
            }
        };
        loop {
            let changed = self.changed.notified();
            if self.open().len() < self.limits.connections {
                break;
            }
            match self.close_idlest() {
                // The task of the closed connection gives its place back.
                true => yield_now().await,
                false => changed.await,
            }
        }
        self.open().insert(number, Open { idle_since: Some(Instant::now()), task: None });
        (stream, Taken(Connection { of: self.clone(), number }))
    }

    /// Closes the connection that has been idle longest; false if none is idle.
    fn close_idlest(&self) -> bool {
        let mut open = self.open();
        let idle = open.values_mut().filter(|it| it.task.is_some() && it.idle_since.is_some());
        let Some(idlest) = idle.min_by_key(|it| it.idle_since) else { return false };
        if let Some(task) = idlest.task.take() {
            task.abort();
        }
        true
    }

    fn change(&self, number: u64, idle_since: Option<Instant>) {
        if let Some(open) = self.open().get_mut(&number) {
            open.idle_since = idle_since;
        }
        self.changed.notify_one();
    }
}

impl Connection {
    /// Time for the body of a request.
    pub fn body_timeout(&self) -> Duration {
        self.of.limits.body
    }

    /// Marks the connection as one with a complete request.
    pub fn busy(self) -> Busy {
        self.of.change(self.number, None);
        Busy(self)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.of.change(self.0.number, Some(Instant::now()));
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.of.open().remove(&self.0.number);
        self.0.of.changed.notify_one();
    }
}
