//! The way to a primary that sentinels name, with TLS and logins: what is wrong on it is refused in one line, by relay and
//! consumer alike.

use outbox_consumer::{Error, TlsCheck};
use outbox_testkit::{Authority, Redis, RedisBuilder, Sentinels};

use crate::world::{DEADLINE, World, place_order, ship};

/// What the relay says in its one line when it does not start, and what the consumer says.
async fn refusals(world: &World) -> [String; 2] {
    let relay = world.relay_command().env("OUTBOX_START_TIMEOUT", "0s");
    let relay = relay.spawn().unwrap();
    let status = relay.wait(DEADLINE).await.unwrap();
    assert_eq!(status.code(), Some(1), "{:?}", relay.lines());
    let said = relay.lines();
    let [line] = said.as_slice() else {
        panic!("not one line: {said:#?}");
    };
    let consumer = world.builder("warehouse", "orders").build().unwrap();
    let run = consumer.run(ship, std::future::pending());
    let ended = tokio::time::timeout(DEADLINE, run).await;
    let error = ended.expect("the consumer ends").unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error:?}");
    let error = error.to_string();
    for text in [line, &error] {
        assert!(!text.contains('\n') && !text.contains("hidden"), "{text}");
    }
    [line.clone(), error]
}

/// Relay and consumer find their way: an order takes effect.
async fn goes_through(world: &World, order: &str) {
    let relay = world.relay();
    let consumer = world.consumer();
    let mut cashier = world.cashier().await;
    place_order(&mut cashier, order).await;
    world.one_effect_for_each_order().await;
    consumer.stop().await;
    assert_eq!(relay.exit_status(), None);
}

/// What the client says for WRONGPASS, or what the server says who was told no password.
fn is_about_login(text: &str) -> bool {
    text.contains("Password authentication failed") || text.contains("NOAUTH")
}

fn with_tls(authority: &Authority, host: &str) -> RedisBuilder {
    Redis::builder()
        .tls(authority.issue(host).unwrap())
        .tls_replication(authority.root())
}

#[tokio::test]
async fn an_authority_that_is_not_trusted_is_refused_and_the_setting_named() {
    let (ours, other) = (Authority::new().unwrap(), Authority::new().unwrap());
    let redis = with_tls(&ours, "127.0.0.1").start().await.unwrap();
    let mut world = World::open_with(redis).await;
    let sentinels = Sentinels::watch(&world.redis, 0).await.unwrap();
    world.redis_url = sentinels.url();
    world.redis_tls.ca_file = Some(other.root());
    let [relay, consumer] = refusals(&world).await;
    assert!(relay.contains("--redis-ca-file"), "{relay}");
    assert!(consumer.contains("ca_file"), "{consumer}");
    for text in [&relay, &consumer] {
        let asked = sentinels.ports().pop().unwrap().to_string();
        assert!(text.contains("UnknownIssuer"), "{text}");
        assert!(text.contains(&asked), "{text}");
    }
    // Nor are those of the system that this test runs on.
    world.redis_tls.ca_file = None;
    refusals(&world).await;
    world.redis_tls.ca_file = Some(ours.root());
    goes_through(&world, "trusted").await;
}

/// The sentinels' own certificates are right; that of the server that they name is not.
#[tokio::test]
async fn the_certificate_of_a_server_must_be_for_the_host_that_the_sentinels_name() {
    let ours = Authority::new().unwrap();
    let redis = with_tls(&ours, "localhost").start().await.unwrap();
    let mut world = World::open_with(redis).await;
    world.redis_tls.ca_file = Some(ours.root());
    let by_address = Sentinels::builder().certificate(ours.issue("127.0.0.1").unwrap());
    let by_address = by_address.watch(&world.redis, 0).await.unwrap();
    world.redis_url = by_address.url();
    let server = format!("127.0.0.1:{}", world.redis.tls_port().unwrap());
    for text in refusals(&world).await {
        assert!(text.contains("not valid for name"), "{text}");
        assert!(text.contains(&server), "{text}");
    }
    // Whoever asks for less gets by.
    world.redis_tls.check = TlsCheck::Ca;
    goes_through(&world, "by-address").await;
    world.redis_tls.check = TlsCheck::Full;
    drop(by_address);

    let by_name = Sentinels::builder().by_name();
    let by_name = by_name.watch(&world.redis, 0).await.unwrap();
    world.redis_url = by_name.url();
    goes_through(&world, "by-name").await;
}

#[tokio::test]
async fn a_wrong_login_of_the_sentinels_is_told_from_one_of_the_server() {
    let ours = Authority::new().unwrap();
    let redis = with_tls(&ours, "127.0.0.1").password("right");
    let mut world = World::open_with(redis.start().await.unwrap()).await;
    world.redis_tls.ca_file = Some(ours.root());
    let sentinels = Sentinels::builder().login("watcher", "also-right");
    let sentinels = sentinels.watch(&world.redis, 0).await.unwrap();
    let url = sentinels.url();
    let of_sentinels = [
        url.replace("=also-right", "=hidden"),
        url.replace("=watcher", "=somebody"),
        url.split('?').next().unwrap().to_owned(),
    ];
    for wrong in of_sentinels {
        world.redis_url = wrong;
        for text in refusals(&world).await {
            assert!(text.contains("a sentinel"), "{text}");
            assert!(is_about_login(&text), "{text}");
        }
    }
    world.redis_url = url.replace(":right@", ":hidden@");
    for text in refusals(&world).await {
        assert!(!text.contains("a sentinel"), "{text}");
        assert!(is_about_login(&text), "{text}");
    }
    world.redis_url = url;
    goes_through(&world, "logged-in").await;
}
