//! An address as text.

use redis::{ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};
use url::form_urlencoded;

use crate::{Error, Way, place::Place, sentinel::Sentinels};

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

pub(crate) struct Parsed {
    pub(crate) info: ConnectionInfo,
    pub(crate) way: Way,
}

pub(crate) fn parse(address: &str) -> Result<Parsed, Error> {
    let bad = |problem: &str, example: &str| Error::Address(format!("{problem}; e.g. {example}"));
    if address.contains('#') {
        return Err(bad("must have no #fragment", "redis://localhost:6379/0"));
    }
    let Some((scheme, rest)) = address.split_once("://") else {
        return Err(bad("is no URL", "redis://:password@localhost:6379/0"));
    };
    if let Some(scheme) = scheme.strip_suffix("+sentinel") {
        let example = "redis+sentinel://:password@host1:26379,host2:26379/mymaster/0";
        let parsed = by_sentinels(scheme, rest);
        return parsed.map_err(|problem| bad(&problem, example));
    }
    let (login, hosts, path) = split(rest);
    if hosts.contains(',') {
        let example = "redis://:password@host1:6379,host2:6379";
        let parsed = by_nodes(scheme, login, hosts, path);
        return parsed.map_err(|problem| bad(&problem, example));
    }
    let info =
        by_url(address).map_err(|problem| bad(&problem, "redis://:password@localhost:6379/0"))?;
    Ok(Parsed {
        way: way_of(&info),
        info,
    })
}

/// One server, or the socket.
pub(crate) fn way_of(info: &ConnectionInfo) -> Way {
    match Place::from(info.addr()) {
        Some(place) => Way::Servers(vec![place]),
        None => Way::Socket,
    }
}

/// Login with its `@`, hosts, and what is behind them, with its `/` or `?`.
fn split(rest: &str) -> (&str, &str, &str) {
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let hosts = authority.rfind('@').map_or(0, |at| at + 1);
    let (login, hosts) = authority.split_at(hosts);
    (login, hosts, path)
}

fn by_url(url: &str) -> Result<ConnectionInfo, String> {
    let parsed = url.into_connection_info();
    parsed.map_err(|error| match error.detail() {
        Some(detail) => detail.to_owned(),
        // Such an error names the rule that was broken, and nothing of the text.
        None => error.to_string(),
    })
}

fn places(hosts: &str, default_port: u16) -> Result<Vec<Place>, String> {
    let places = hosts
        .split(',')
        .map(|host| Place::parse(host, default_port));
    let places: Result<_, &str> = places.collect();
    places.map_err(str::to_owned)
}

fn by_nodes(scheme: &str, login: &str, hosts: &str, path: &str) -> Result<Parsed, String> {
    let places = places(hosts, PORT)?;
    let info = by_url(&format!("{scheme}://{login}{}{path}", places[0]))?;
    if info.redis_settings().db() != 0 {
        return Err("names several nodes of a cluster, which has no database but 0".into());
    }
    Ok(Parsed {
        info,
        way: Way::Servers(places),
    })
}

fn by_sentinels(scheme: &str, rest: &str) -> Result<Parsed, String> {
    let (login, hosts, path) = split(rest);
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    let path = path.strip_prefix('/').unwrap_or(path);
    let (primary, database) = path.split_once('/').unwrap_or((path, "0"));
    if primary.is_empty() {
        return Err("names no primary behind the sentinels".into());
    }
    let places = places(hosts, SENTINEL_PORT)?;
    let mut of_sentinels = RedisConnectionInfo::default();
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        of_sentinels = match &*name {
            "sentinel_user" => of_sentinels.set_username(value),
            "sentinel_password" => of_sentinels.set_password(value),
            _ => return Err("knows sentinel_user and sentinel_password behind the ?".into()),
        };
    }
    // The host stands in for the one that the sentinels name.
    let info = by_url(&format!("{scheme}://{login}{}/{database}", places[0]))?;
    if Place::from(info.addr()).is_none() {
        return Err("asks sentinels for a socket of the file system".into());
    }
    Ok(Parsed {
        info,
        way: Way::Sentinels(Sentinels {
            places,
            primary: primary.to_owned(),
            login: of_sentinels,
        }),
    })
}

#[cfg(test)]
mod tests {
    use crate::RedisAddress;

    fn described(address: &str) -> String {
        RedisAddress::parse(address).unwrap().to_string()
    }

    #[test]
    fn what_is_left_out_has_its_default() {
        for (address, description) in [
            ("redis://localhost", "localhost:6379"),
            ("redis://u:p@10.0.0.1:7000/3", "10.0.0.1:7000"),
            ("redis://[::1]:7000", "[::1]:7000"),
            (
                "redis://a,b:7001,[::1],[::2]:7",
                "a:6379,b:7001,[::1]:6379,[::2]:7",
            ),
            ("redis://:p%40w@a,b/0?protocol=resp3", "a:6379,b:6379"),
            ("redis+unix:///run/a,b.sock", "/run/a,b.sock"),
            ("redis+sentinel://a/shop", "shop of sentinels a:26379"),
        ] {
            assert_eq!(described(address), description, "{address}");
        }
    }

    #[test]
    fn logins_and_databases_are_the_servers() {
        for address in [
            "redis+sentinel://u:p%40w@a:1,b,[::1]:3/shop/2?sentinel_password=s",
            "redis://u:p%40w@a:1/2",
        ] {
            let address = RedisAddress::parse(address).unwrap();
            let login = address.info.redis_settings();
            let found = (login.username(), login.password(), login.db());
            assert_eq!(found, (Some("u"), Some("p@w"), 2));
            assert!(!address.is_with_tls());
            assert!(!format!("{address:?} {address}").contains("p@w"));
        }
        let address = RedisAddress::parse("redis://u:p%40w@a:1,b").unwrap();
        assert_eq!(address.info.redis_settings().password(), Some("p@w"));
    }

    #[test]
    fn what_is_not_understood_is_refused_and_not_repeated() {
        for address in [
            "hidden",
            "redis://",
            "redis://:hidden@a:port",
            "redis://:hidden@a:port,b",
            "redis://:hidden@a,,b",
            "redis://:hidden@a,b/2",
            "redis://:hidden@[::1,b",
            "redis://:hidden@a/first",
            "redis://:hidden@a#insecure",
            "http://:hidden@a",
            "http://:hidden@a,b",
            "redis+sentinel://:hidden@a:1",
            "redis+sentinel://:hidden@a:1/",
            "redis+sentinel://:hidden@a:port/shop",
            "redis+sentinel://:hidden@,b/shop",
            "redis+sentinel://:hidden@a/shop/first",
            "redis+sentinel://:hidden@a/shop?colour=red",
            "http+sentinel://:hidden@a/shop",
            "redis+unix+sentinel://:hidden@a/shop",
        ] {
            let refusal = RedisAddress::parse(address).err();
            let refusal = refusal.unwrap_or_else(|| panic!("{address}")).to_string();
            assert!(refusal.contains("e.g. redis"), "{address}: {refusal}");
            assert!(!refusal.contains("hidden"), "{address}: {refusal}");
        }
    }
}
