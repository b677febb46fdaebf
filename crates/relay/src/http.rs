//! Answers on `/metrics`, `/healthz` and `/readyz`.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::{Router, routing::get};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::error::{Error, Result};
use crate::health::{Health, Readiness};
use crate::metric_names as names;

/// Bounds of the buckets of all histograms, in seconds.
const BUCKETS: [f64; 16] = [
    0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0,
    300.0, 3_600.0,
];

#[derive(Clone)]
struct Answers {
    health: Health,
    metrics: PrometheusHandle,
}

/// Installs the recorder of this process's metrics and answers HTTP requests in the background until the runtime
/// ends. Returns the address, of which port 0 is filled in.
///
/// - `/metrics`: the metrics of [`crate::metric_names`], in Prometheus' text format.
/// - `/healthz`: 200 as long as the process answers.
/// - `/readyz`: 200 where [`Health::readiness`] says ready, else 503; the body is the reason.
///
/// # Errors
///
/// [`Error::Config`] when the address cannot be listened on, and [`Error::Setup`] when the process has a recorder
/// already.
pub async fn serve_http(address: SocketAddr, health: Health) -> Result<SocketAddr> {
    let unusable = |e: std::io::Error| Error::Config {
        field: "--listen",
        problem: format!("{address} cannot be listened on: {e}"),
    };
    let listener = TcpListener::bind(address).await.map_err(unusable)?;
    let bound = listener.local_addr().map_err(unusable)?;
    let metrics = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &BUCKETS)
        .and_then(|builder| builder.install_recorder())
        .map_err(|e| Error::Setup {
            problem: format!("metrics cannot be recorded: {e}"),
            remedy: "serve HTTP once in a process".into(),
        })?;
    names::describe();
    let upkeep = metrics.clone();
    let app = Router::new()
        .route("/metrics", get(render))
        .route("/healthz", get(|| async { "alive\n" }))
        .route("/readyz", get(ready))
        .with_state(Answers { health, metrics });
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, app).await {
            tracing::error!(%error, "HTTP is not answered any more; restart the relay");
        }
    });
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            upkeep.run_upkeep();
        }
    });
    tracing::info!(address = %bound, "answering /metrics, /healthz and /readyz");
    Ok(bound)
}

/// How long a relay may take to say whether it is ready.
const ASK_LIMIT: Duration = Duration::from_secs(3);

/// Bytes of an answer that are read.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// Asks a relay that answers HTTP on this address whether it is ready. An address of all interfaces is asked on this host.
///
/// # Errors
///
/// [`Error::Setup`] when nobody answers there within three seconds, or something else than a relay.
pub async fn ask_readiness(mut address: SocketAddr) -> Result<Readiness> {
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    let asked = async {
        let mut stream = TcpStream::connect(address).await?;
        let request = format!("GET /readyz HTTP/1.0\r\nHost: {address}\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream
            .take(ANSWER_BYTES_MAX)
            .read_to_string(&mut answer)
            .await?;
        Ok::<_, std::io::Error>(answer)
    };
    let refused = |problem: String| Error::Setup {
        problem,
        remedy: "give the address that `outbox-relay run` was given with --listen".into(),
    };
    let answer = tokio::time::timeout(ASK_LIMIT, asked)
        .await
        .map_err(|_| refused(format!("nobody answers on {address} within {ASK_LIMIT:?}")))?
        .map_err(|error| refused(format!("no relay answers on {address}: {error}")))?;
    let status = answer.split_ascii_whitespace().nth(1);
    let (Some(status @ ("200" | "503")), Some((_, reason))) =
        (status, answer.split_once("\r\n\r\n"))
    else {
        return Err(refused(format!("what answers on {address} is no relay")));
    };
    Ok(Readiness {
        is_ready: status == "200",
        reason: reason.trim_end().to_owned(),
    })
}

async fn render(State(answers): State<Answers>) -> impl IntoResponse {
    (
        [(header::CONTENT_TYPE, "text/plain; version=0.0.4")],
        answers.metrics.render(),
    )
}

async fn ready(State(answers): State<Answers>) -> (StatusCode, String) {
    let readiness = answers.health.readiness();
    let status = if readiness.is_ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (status, format!("{}\n", readiness.reason))
}
