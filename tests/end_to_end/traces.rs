//! One trace, from the span in which a message is written to the handler that applies it.

use opentelemetry::trace::{TraceContextExt as _, TracerProvider as _};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider};
use outbox_testkit::eventually;
use tracing::Instrument as _;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::world::{DEADLINE, World, place_order};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_handler_s_span_is_a_child_of_the_one_that_wrote_the_message() {
    // For the whole process: the handler runs on a thread of the consumer's. Other tests' spans are of other traces.
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder()
        .with_simple_exporter(exporter.clone())
        .build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    let subscriber = tracing_subscriber::registry().with(layer);
    tracing::subscriber::set_global_default(subscriber).unwrap();

    let world = World::open().await;
    let relay = world.relay();
    let consumer = world.consumer();
    let mut cashier = world.cashier().await;
    place_order(&mut cashier, "untraced").await;
    world.one_effect_for_each_order().await;
    // A test beside this one that came upon a span while the subscriber was set may have switched it off for all.
    tracing::callsite::rebuild_interest_cache();
    let span = tracing::info_span!("place an order");
    let writer = span.context().span().span_context().clone();
    assert!(writer.is_valid());
    place_order(&mut cashier, "traced").instrument(span).await;
    world.one_effect_for_each_order().await;

    let handled = eventually(DEADLINE, "the span of the handler", || async {
        let spans = exporter.get_finished_spans().unwrap();
        spans
            .into_iter()
            .find(|span| span.name == "handle" && span.span_context.trace_id() == writer.trace_id())
    })
    .await
    .unwrap();
    assert_eq!(handled.parent_span_id, writer.span_id());
    assert!(handled.parent_span_is_remote);

    let headers = "SELECT message_key, headers->>'traceparent' FROM outbox.messages ORDER BY id";
    let rows = world.shop.query(headers, &[]).await.unwrap();
    let headers: Vec<(String, Option<String>)> =
        rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    let parent = format!("00-{}-{}-01", writer.trace_id(), writer.span_id());
    assert_eq!(
        headers,
        [
            ("untraced".to_owned(), None),
            ("traced".to_owned(), Some(parent))
        ]
    );
    consumer.stop().await;
    drop(relay);
}
