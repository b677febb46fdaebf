//! Spans of publishing reach a collector; a collector that is away costs nothing else.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    sync::mpsc,
};

use outbox_testkit::ProcessBuilder;
use serde_json::Value;

use crate::pair::stop;
use crate::support::{DEADLINE, Outbox, leading};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const SPAN: &str = "b7ad6b7169203331";

/// Commits a message with the context of a trace.
async fn write_traced(outbox: &Outbox<'_>, message_key: &str, flags: &str) {
    let headers = format!(r#"{{"traceparent":"00-{TRACE}-{SPAN}-{flags}"}}"#);
    let sql = "SELECT outbox.publish('orders', '{}', message_key => $1, headers => $2::text::json)";
    outbox
        .db
        .query_one(sql, &[&message_key, &headers])
        .await
        .unwrap();
    outbox.arrives(message_key).await;
}

/// A collector that takes JSON, and what it was sent.
fn collector() -> (String, mpsc::Receiver<Value>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (sent, received) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            let (mut line, mut length, mut first) = (String::new(), 0, String::new());
            while stream.read_line(&mut line).unwrap() > 2 {
                if first.is_empty() {
                    first.clone_from(&line);
                }
                let header = line.to_ascii_lowercase();
                if let Some(value) = header.strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
                line.clear();
            }
            let mut body = vec![0; length];
            stream.read_exact(&mut body).unwrap();
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}";
            stream.get_mut().write_all(answer).unwrap();
            assert!(first.starts_with("POST /v1/traces "), "{first}");
            if sent.send(serde_json::from_slice(&body).unwrap()).is_err() {
                return;
            }
        }
    });
    (address, received)
}

fn traced(relay: ProcessBuilder, endpoint: &str) -> ProcessBuilder {
    relay
        .args(["--otlp-endpoint", endpoint])
        .env("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
        // The stop sends what is left, and not a timer.
        .env("OTEL_BSP_SCHEDULE_DELAY", "600000")
}

#[tokio::test]
async fn a_sampled_trace_gets_a_span_of_its_publishing() {
    let (endpoint, received) = collector();
    let outbox = Outbox::open().await;
    let relay = leading(traced(outbox.relay(), &endpoint)).await;
    outbox.insert("without").await;
    write_traced(&outbox, "unsampled", "00").await;
    write_traced(&outbox, "sampled", "01").await;
    // The headers go out as they came.
    let entries = outbox.entries("orders").await;
    assert!(entries[2].text("headers").contains(SPAN));
    stop(&relay).await;

    let report = tokio::task::spawn_blocking(move || received.recv_timeout(DEADLINE));
    let report = report.await.unwrap().unwrap();
    let resource = &report["resourceSpans"][0];
    assert!(
        resource["resource"].to_string().contains("outbox-relay"),
        "{report}"
    );
    let spans = resource["scopeSpans"][0]["spans"].as_array().unwrap();
    assert_eq!(spans.len(), 1, "{report}");
    let span = &spans[0];
    assert_eq!(span["name"], "publish");
    assert_eq!(span["traceId"], TRACE);
    assert_eq!(span["parentSpanId"], SPAN);
    assert!(span["attributes"].to_string().contains("sampled"), "{span}");
}

#[tokio::test]
async fn a_collector_that_is_away_costs_spans_and_nothing_else() {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", nobody.local_addr().unwrap());
    drop(nobody);
    let outbox = Outbox::open().await;
    let relay = leading(traced(outbox.relay(), &endpoint)).await;
    for n in 0..5 {
        write_traced(&outbox, &format!("row-{n}"), "01").await;
    }
    assert_eq!(outbox.published_exactly_once("orders").await, 5);
    stop(&relay).await;
}
