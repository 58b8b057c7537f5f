//! [`Storage`] on a folder, and on a small server with the requests of S3 that it makes.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, Method, StatusCode, Uri},
    response::{IntoResponse, Response},
};
use tokio::net::TcpListener;

use super::*;

/// Objects by path, parts of uploads by number, and answers that come before those to requests.
#[derive(Default)]
struct Bucket {
    objects: BTreeMap<String, Vec<u8>>,
    parts: BTreeMap<usize, Vec<u8>>,
    refusals: Vec<StatusCode>,
    requests: usize,
}

type Shared = Arc<Mutex<Bucket>>;

async fn answer(
    State(bucket): State<Shared>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let mut bucket = bucket.lock().unwrap();
    bucket.requests += 1;
    if let Some(refusal) = bucket.refusals.pop() {
        return refusal.into_response();
    }
    assert!(headers["authorization"].to_str().unwrap().starts_with("AWS4-HMAC-SHA256 Credential=key/"));
    let key = uri.path().strip_prefix("/bucket").unwrap().trim_start_matches('/').to_owned();
    let query: BTreeMap<&str, &str> =
        uri.query().unwrap_or_default().split('&').map(|it| it.split_once('=').unwrap_or((it, ""))).collect();
    let tagged = |status: StatusCode, body: Vec<u8>| {
        (status, [("etag", "\"tag\""), ("last-modified", "Sat, 28 Nov 2026 12:00:00 GMT")], body)
            .into_response()
    };
    match (method.as_str(), query.get("partNumber"), query.contains_key("uploads")) {
        ("POST", _, true) => {
            "<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
                .into_response()
        }
        ("POST", ..) if query.contains_key("delete") => {
            let body = String::from_utf8(body.to_vec()).unwrap();
            let keys = body.split("<Key>").skip(1).filter_map(|rest| rest.split_once("</Key>"));
            let removed = keys.map(|(key, _)| {
                bucket.objects.remove(key);
                format!("<Deleted><Key>{key}</Key></Deleted>")
            });
            format!("<DeleteResult>{}</DeleteResult>", removed.collect::<String>()).into_response()
        }
        ("POST", ..) => {
            let whole: Vec<u8> = std::mem::take(&mut bucket.parts).into_values().flatten().collect();
            bucket.objects.insert(key, whole);
            "<CompleteMultipartUploadResult><ETag>tag</ETag></CompleteMultipartUploadResult>".into_response()
        }
        ("PUT", Some(number), _) => {
            bucket.parts.insert(number.parse().unwrap(), body.to_vec());
            tagged(StatusCode::OK, Vec::new())
        }
        ("PUT", ..) => {
            bucket.objects.insert(key, body.to_vec());
            tagged(StatusCode::OK, Vec::new())
        }
        ("GET", ..) if query.contains_key("list-type") => {
            let prefix = query.get("prefix").unwrap_or(&"").replace("%2F", "/");
            listed(&bucket.objects, &prefix).into_response()
        }
        ("GET", ..) => match (bucket.objects.get(&key), headers.get("range")) {
            (None, _) => StatusCode::NOT_FOUND.into_response(),
            (Some(bytes), None) => tagged(StatusCode::OK, bytes.clone()),
            (Some(bytes), Some(range)) => {
                let range = range.to_str().unwrap().strip_prefix("bytes=").unwrap();
                let (start, last) = range.split_once('-').unwrap();
                let (start, last): (usize, usize) = (start.parse().unwrap(), last.parse().unwrap());
                let mut answer = tagged(StatusCode::PARTIAL_CONTENT, bytes[start..=last].to_vec());
                let of = format!("bytes {start}-{last}/{}", bytes.len());
                answer.headers_mut().insert("content-range", of.parse().unwrap());
                answer
            }
        },
        _ => StatusCode::METHOD_NOT_ALLOWED.into_response(),
    }
}

/// One level below a prefix.
fn listed(objects: &BTreeMap<String, Vec<u8>>, prefix: &str) -> String {
    let mut rows = String::new();
    let mut folders = std::collections::BTreeSet::new();
    for (key, bytes) in objects {
        let Some(rest) = key.strip_prefix(prefix) else { continue };
        match rest.split_once('/') {
            Some((folder, _)) => drop(folders.insert(format!("{prefix}{folder}/"))),
            None => {
                rows += &format!(
                    "<Contents><Key>{key}</Key><LastModified>2026-11-28T12:00:00.000Z</LastModified><ETag>tag</ETag>\
                 <Size>{}</Size></Contents>",
                    bytes.len()
                )
            }
        }
    }
    for folder in folders {
        rows += &format!("<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>");
    }
    format!("<ListBucketResult>{rows}</ListBucketResult>")
}

/// A bucket's server, which ends with this process, and the storage in it.
fn served() -> (Shared, Storage) {
    let bucket = Shared::default();
    let (of_server, (to, address)) = (bucket.clone(), std::sync::mpsc::channel());
    thread::spawn(move || {
        Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            to.send(listener.local_addr().unwrap()).unwrap();
            // The largest part, and more.
            let limit = axum::extract::DefaultBodyLimit::max(2 * PART_BYTES);
            let router = Router::new().fallback(answer).layer(limit).with_state(of_server);
            axum::serve(listener, router).await.unwrap();
        });
    });
    let endpoint = format!("http://{}", address.recv().unwrap());
    let timeout = Duration::from_secs(20);
    let builder = AmazonS3Builder::new()
        .with_bucket_name("bucket")
        .with_endpoint(endpoint)
        .with_access_key_id("key")
        .with_secret_access_key("secret")
        .with_retry(retry(timeout))
        .with_http_connector(Connector { timeout });
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    let (url, store) = ("s3://bucket/runs/first".to_owned(), Box::new(builder.build().unwrap()));
    (bucket, Storage { url, store, prefix: Key::from("runs/first"), folder: None, timeout, runtime })
}

fn round(storage: &Storage) {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    storage.check().unwrap();
    assert_eq!(storage.list("").unwrap(), []);
    assert_eq!(storage.get_bytes("a/absent").unwrap(), None);
    storage.put_bytes("a/small", b"small").unwrap();
    // Two parts, the second of which is not full.
    let large: Vec<u8> = (0..PART_BYTES + 5).map(|index| (index / 7) as u8).collect();
    fs::write(&from, &large).unwrap();
    storage.put_file("a/b/large", &from).unwrap();
    storage.get_file("a/b/large", large.len() as u64, &to).unwrap();
    assert!(fs::read(&to).unwrap() == large, "the file came back as another");
    assert_eq!(storage.get_bytes("a/small").unwrap().unwrap(), b"small");
    let [small, large] = [("a/small".to_owned(), 5), ("a/b/large".to_owned(), large.len() as u64)];
    assert_eq!(storage.list("a").unwrap(), [large.clone(), small.clone()]);
    assert_eq!(storage.list("a/b").unwrap(), [large]);
    storage.remove("a/b/large").unwrap();
    storage.remove("a/b/large").unwrap();
    assert_eq!(storage.list("").unwrap(), [small]);
    storage.put_bytes("b/c/one", b"1").unwrap();
    storage.remove_below("b").unwrap();
    storage.remove_below("b").unwrap();
    assert_eq!(storage.list("b").unwrap(), []);
}

#[test]
fn a_folder_keeps_what_is_put_there() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}/new/store", folder.path().display());
    round(&Storage::open(&url, Duration::from_secs(1)).unwrap());
}

#[test]
fn a_bucket_keeps_what_is_put_there() {
    let (bucket, storage) = served();
    round(&storage);
    let keys: Vec<_> = bucket.lock().unwrap().objects.keys().cloned().collect();
    assert_eq!(keys, ["runs/first/a/small"]);
}

#[test]
fn a_request_is_tried_again_unless_it_is_refused() {
    let (bucket, storage) = served();
    bucket.lock().unwrap().refusals = vec![StatusCode::SERVICE_UNAVAILABLE; 2];
    storage.put_bytes("key", b"bytes").unwrap();
    assert_eq!(bucket.lock().unwrap().requests, 3);
    bucket.lock().unwrap().refusals = vec![StatusCode::FORBIDDEN];
    let error = storage.check().unwrap_err().to_string();
    assert!(error.starts_with("`checkpoint.storage` s3://bucket/runs/first: cannot write probe-"), "{error}");
    assert_eq!(bucket.lock().unwrap().requests, 4);
}
