"""The queries of Nexmark in SQL: in Flink's spelling, as streams, and in DuckDB's, over tables at rest.

Both have the same columns. Windows that DuckDB has not are written out with arithmetic: `WINDOWED` gives each row of a
sliding window once for each window.
"""

from __future__ import annotations

_RANKS = """
    COUNT(*) AS total_bids,
    COUNT(*) FILTER (WHERE price < 10000) AS rank1_bids,
    COUNT(*) FILTER (WHERE price >= 10000 AND price < 1000000) AS rank2_bids,
    COUNT(*) FILTER (WHERE price >= 1000000) AS rank3_bids"""

_UNIQUES = """
    COUNT(DISTINCT bidder) AS total_bidders,
    COUNT(DISTINCT bidder) FILTER (WHERE price < 10000) AS rank1_bidders,
    COUNT(DISTINCT bidder) FILTER (WHERE price >= 10000 AND price < 1000000) AS rank2_bidders,
    COUNT(DISTINCT bidder) FILTER (WHERE price >= 1000000) AS rank3_bidders,
    COUNT(DISTINCT auction) AS total_auctions,
    COUNT(DISTINCT auction) FILTER (WHERE price < 10000) AS rank1_auctions,
    COUNT(DISTINCT auction) FILTER (WHERE price >= 10000 AND price < 1000000) AS rank2_auctions,
    COUNT(DISTINCT auction) FILTER (WHERE price >= 1000000) AS rank3_auctions"""

FLINK = {
    "q0": "SELECT auction, bidder, price, `dateTime`, extra FROM bid",
    "q1": "SELECT auction, bidder, 0.908 * price AS price, `dateTime`, extra FROM bid",
    "q2": "SELECT auction, price FROM bid WHERE MOD(auction, 123) = 0",
    "q3": """
SELECT P.name, P.city, P.state, A.id
FROM auction AS A
JOIN person AS P ON A.seller = P.id
WHERE A.category = 10 AND (P.state = 'OR' OR P.state = 'ID' OR P.state = 'CA')""",
    "q4": """
SELECT category, AVG(final) AS average
FROM (
    SELECT MAX(B.price) AS final, A.category
    FROM auction AS A, bid AS B
    WHERE A.id = B.auction AND B.`dateTime` BETWEEN A.`dateTime` AND A.expires
    GROUP BY A.id, A.category
) AS W
GROUP BY category""",
    "q5": """
SELECT C.auction, C.num
FROM (
    SELECT auction, COUNT(*) AS num, window_start, window_end
    FROM TABLE(HOP(TABLE bid, DESCRIPTOR(`dateTime`), INTERVAL '2' SECOND, INTERVAL '10' SECOND))
    GROUP BY auction, window_start, window_end
) AS C
JOIN (
    SELECT MAX(num) AS most, window_start, window_end
    FROM (
        SELECT COUNT(*) AS num, window_start, window_end
        FROM TABLE(HOP(TABLE bid, DESCRIPTOR(`dateTime`), INTERVAL '2' SECOND, INTERVAL '10' SECOND))
        GROUP BY auction, window_start, window_end
    ) AS N
    GROUP BY window_start, window_end
) AS M
ON C.window_start = M.window_start AND C.window_end = M.window_end AND C.num >= M.most""",
    "q6": """
SELECT seller, AVG(price) OVER (PARTITION BY seller ORDER BY `dateTime`, id
                                ROWS BETWEEN 10 PRECEDING AND CURRENT ROW) AS average
FROM (
    SELECT A.id, A.seller, B.price, B.`dateTime`,
           ROW_NUMBER() OVER (PARTITION BY A.id, A.seller ORDER BY B.price DESC, B.`dateTime`) AS rownum
    FROM auction AS A, bid AS B
    WHERE A.id = B.auction AND B.`dateTime` BETWEEN A.`dateTime` AND A.expires
) AS W
WHERE rownum <= 1""",
    "q7": """
SELECT B.auction, B.price, B.bidder, B.`dateTime`, B.extra
FROM bid AS B
JOIN (
    SELECT MAX(price) AS highest, window_end
    FROM TABLE(TUMBLE(TABLE bid, DESCRIPTOR(`dateTime`), INTERVAL '10' SECOND))
    GROUP BY window_start, window_end
) AS H
ON B.price = H.highest
WHERE B.`dateTime` BETWEEN H.window_end - INTERVAL '10' SECOND AND H.window_end""",
    "q8": """
SELECT P.id, P.name, P.window_start
FROM (
    SELECT id, name, window_start, window_end
    FROM TABLE(TUMBLE(TABLE person, DESCRIPTOR(`dateTime`), INTERVAL '10' SECOND))
    GROUP BY id, name, window_start, window_end
) AS P
JOIN (
    SELECT seller, window_start, window_end
    FROM TABLE(TUMBLE(TABLE auction, DESCRIPTOR(`dateTime`), INTERVAL '10' SECOND))
    GROUP BY seller, window_start, window_end
) AS A
ON P.id = A.seller AND P.window_start = A.window_start AND P.window_end = A.window_end""",
    "q9": """
SELECT id, itemName, description, initialBid, reserve, `dateTime`, expires, seller, category, extra,
       auction, bidder, price, bid_dateTime, bid_extra
FROM (
    SELECT A.*, B.auction, B.bidder, B.price, B.`dateTime` AS bid_dateTime, B.extra AS bid_extra,
           ROW_NUMBER() OVER (PARTITION BY A.id ORDER BY B.price DESC, B.`dateTime` ASC, B.bidder ASC) AS rownum
    FROM auction AS A, bid AS B
    WHERE A.id = B.auction AND B.`dateTime` BETWEEN A.`dateTime` AND A.expires
) AS W
WHERE rownum <= 1""",
    "q10": """
SELECT auction, bidder, price, `dateTime`, extra,
       DATE_FORMAT(`dateTime`, 'yyyy-MM-dd') AS dt, DATE_FORMAT(`dateTime`, 'HH:mm') AS hm
FROM bid""",
    "q11": """
SELECT bidder, COUNT(*) AS bid_count, window_start AS starttime, window_end AS endtime
FROM TABLE(SESSION(TABLE bid PARTITION BY bidder, DESCRIPTOR(`dateTime`), INTERVAL '10' SECOND))
GROUP BY bidder, window_start, window_end""",
    "q12": """
SELECT bidder, COUNT(*) AS bid_count, window_start AS starttime, window_end AS endtime
FROM TABLE(TUMBLE(TABLE bid, DESCRIPTOR(`dateTime`), INTERVAL '10' SECOND))
GROUP BY bidder, window_start, window_end""",
    "q13": """
SELECT B.auction, B.bidder, B.price, B.`dateTime`, S.`value`
FROM bid AS B
JOIN side_input AS S ON MOD(B.auction, 10000) = S.key""",
    "q14": """
SELECT auction, bidder, 0.908 * price AS price,
       CASE
           WHEN HOUR(`dateTime`) >= 8 AND HOUR(`dateTime`) <= 18 THEN 'dayTime'
           WHEN HOUR(`dateTime`) <= 6 OR HOUR(`dateTime`) >= 20 THEN 'nightTime'
           ELSE 'otherTime'
       END AS bidTimeType,
       `dateTime`, extra, CHAR_LENGTH(extra) - CHAR_LENGTH(REPLACE(extra, 'c', '')) AS c_counts
FROM bid
WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000""",
    "q15": f"""
SELECT DATE_FORMAT(`dateTime`, 'yyyy-MM-dd') AS `day`,{_RANKS},{_UNIQUES}
FROM bid
GROUP BY DATE_FORMAT(`dateTime`, 'yyyy-MM-dd')""",
    "q16": f"""
SELECT channel, DATE_FORMAT(`dateTime`, 'yyyy-MM-dd') AS `day`,
    MAX(DATE_FORMAT(`dateTime`, 'HH:mm')) AS `minute`,{_RANKS},{_UNIQUES}
FROM bid
GROUP BY channel, DATE_FORMAT(`dateTime`, 'yyyy-MM-dd')""",
    "q17": f"""
SELECT auction, DATE_FORMAT(`dateTime`, 'yyyy-MM-dd') AS `day`,{_RANKS},
    MIN(price) AS min_price, MAX(price) AS max_price, AVG(price) AS avg_price, SUM(price) AS sum_price
FROM bid
GROUP BY auction, DATE_FORMAT(`dateTime`, 'yyyy-MM-dd')""",
    "q18": """
SELECT auction, bidder, price, channel, url, `dateTime`, extra
FROM (
    SELECT *, ROW_NUMBER() OVER (PARTITION BY bidder, auction ORDER BY `dateTime` DESC, extra DESC) AS rank_number
    FROM bid
) AS R
WHERE rank_number <= 1""",
    "q19": """
SELECT auction, bidder, price, channel, url, `dateTime`, extra
FROM (
    SELECT *, ROW_NUMBER() OVER (PARTITION BY auction ORDER BY price DESC, extra DESC) AS rank_number
    FROM bid
) AS R
WHERE rank_number <= 10""",
    "q20": """
SELECT B.auction, B.bidder, B.price, B.channel, B.url, B.`dateTime` AS bid_dateTime, B.extra AS bid_extra,
       A.itemName, A.description, A.initialBid, A.reserve, A.`dateTime` AS auction_dateTime, A.expires, A.seller,
       A.category, A.extra AS auction_extra
FROM bid AS B
JOIN auction AS A ON B.auction = A.id
WHERE A.category = 10""",
    "q21": """
SELECT auction, bidder, price, channel,
       CASE
           WHEN LOWER(channel) = 'apple' THEN '0'
           WHEN LOWER(channel) = 'google' THEN '1'
           WHEN LOWER(channel) = 'facebook' THEN '2'
           WHEN LOWER(channel) = 'baidu' THEN '3'
           ELSE REGEXP_EXTRACT(url, '(&|^)channel_id=([^&]*)', 2)
       END AS channel_id
FROM bid
WHERE REGEXP_EXTRACT(url, '(&|^)channel_id=([^&]*)', 2) IS NOT NULL
   OR LOWER(channel) IN ('apple', 'google', 'facebook', 'baidu')""",
    "q22": """
SELECT auction, bidder, price, channel,
       SPLIT_INDEX(url, '/', 3) AS dir1, SPLIT_INDEX(url, '/', 4) AS dir2, SPLIT_INDEX(url, '/', 5) AS dir3
FROM bid""",
}

# The start of the 10 s window in which a row is.
_TEN_S = "time_bucket(INTERVAL 10 SECOND, dateTime::TIMESTAMP)"

# Each bid once for each of the five windows of 10 s, one every 2 s, in which it is.
_HOPS = """
    SELECT auction, COUNT(*) AS num,
           time_bucket(INTERVAL 2 SECOND, dateTime::TIMESTAMP) - INTERVAL 2 SECOND * hop AS window_start
    FROM bid, range(5) AS hops(hop)
    GROUP BY ALL"""

_WINNING = """
    SELECT A.*, B.auction, B.bidder, B.price, B.dateTime AS bid_dateTime, B.extra AS bid_extra,
           ROW_NUMBER() OVER (PARTITION BY A.id ORDER BY B.price DESC, B.dateTime, B.bidder) AS rownum
    FROM auction AS A JOIN bid AS B ON A.id = B.auction AND B.dateTime BETWEEN A.dateTime AND A.expires"""

_DAY = "strftime(dateTime, '%Y-%m-%d')"

DUCKDB = {
    **{name: FLINK[name].replace("`", '"') for name in ("q0", "q2", "q3", "q4", "q13", "q18", "q19", "q20")},
    "q1": "SELECT auction, bidder, 0.908::DOUBLE * price AS price, dateTime, extra FROM bid",
    "q5": f"""
WITH counts AS ({_HOPS})
SELECT auction, num FROM counts QUALIFY num = MAX(num) OVER (PARTITION BY window_start)""",
    "q6": f"""
SELECT seller, AVG(price) OVER (PARTITION BY seller ORDER BY bid_dateTime, id
                                ROWS BETWEEN 10 PRECEDING AND CURRENT ROW) AS average
FROM ({_WINNING}) WHERE rownum = 1""",
    "q7": f"""
WITH highest AS (SELECT MAX(price) AS price, {_TEN_S} AS window_start FROM bid GROUP BY ALL)
SELECT auction, B.price, bidder, dateTime, extra
FROM bid AS B JOIN highest AS H USING (price)
WHERE dateTime BETWEEN window_start AND window_start + INTERVAL 10 SECOND""",
    "q8": f"""
SELECT DISTINCT P.id, P.name, P.window_start
FROM (SELECT *, {_TEN_S} AS window_start FROM person) AS P
JOIN (SELECT DISTINCT seller, {_TEN_S} AS window_start FROM auction) AS A
ON P.id = A.seller AND P.window_start = A.window_start""",
    "q9": f"SELECT * EXCLUDE (rownum) FROM ({_WINNING}) WHERE rownum = 1",
    "q10": f"SELECT auction, bidder, price, dateTime, extra, {_DAY} AS dt, strftime(dateTime, '%H:%M') AS hm FROM bid",
    "q11": """
WITH steps AS (
    SELECT bidder, dateTime::TIMESTAMP AS t,
           LAG(dateTime::TIMESTAMP) OVER (PARTITION BY bidder ORDER BY dateTime) AS before
    FROM bid
), sessions AS (
    SELECT bidder, t, SUM((before IS NULL OR t - before > INTERVAL 10 SECOND)::INT)
                      OVER (PARTITION BY bidder ORDER BY t ROWS UNBOUNDED PRECEDING) AS session
    FROM steps
)
SELECT bidder, COUNT(*) AS bid_count, MIN(t) AS starttime, MAX(t) + INTERVAL 10 SECOND AS endtime
FROM sessions GROUP BY bidder, session""",
    "q12": f"""
SELECT bidder, COUNT(*) AS bid_count, {_TEN_S} AS starttime, {_TEN_S} + INTERVAL 10 SECOND AS endtime
FROM bid GROUP BY ALL""",
    "q14": """
SELECT auction, bidder, 0.908::DOUBLE * price AS price,
       CASE WHEN hour(dateTime::TIMESTAMP) BETWEEN 8 AND 18 THEN 'dayTime'
            WHEN hour(dateTime::TIMESTAMP) <= 6 OR hour(dateTime::TIMESTAMP) >= 20 THEN 'nightTime'
            ELSE 'otherTime' END AS bidTimeType,
       dateTime, extra, length(extra) - length(replace(extra, 'c', '')) AS c_counts
FROM bid WHERE 0.908::DOUBLE * price > 1000000 AND 0.908::DOUBLE * price < 50000000""",
    "q15": f"SELECT {_DAY} AS day,{_RANKS},{_UNIQUES} FROM bid GROUP BY ALL",
    "q16": f"""
SELECT channel, {_DAY} AS day, MAX(strftime(dateTime, '%H:%M')) AS minute,{_RANKS},{_UNIQUES}
FROM bid GROUP BY ALL""",
    "q17": f"""
SELECT auction, {_DAY} AS day,{_RANKS},
    MIN(price) AS min_price, MAX(price) AS max_price, AVG(price) AS avg_price, SUM(price)::BIGINT AS sum_price
FROM bid GROUP BY ALL""",
    "q21": """
SELECT auction, bidder, price, channel,
       CASE lower(channel) WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3'
                           ELSE regexp_extract(url, '(&|^)channel_id=([^&]*)', 2) END AS channel_id
FROM bid
WHERE regexp_matches(url, '(&|^)channel_id=([^&]*)') OR lower(channel) IN ('apple', 'google', 'facebook', 'baidu')""",
    "q22": """
SELECT auction, bidder, price, channel,
       split_part(url, '/', 4) AS dir1, split_part(url, '/', 5) AS dir2, split_part(url, '/', 6) AS dir3
FROM bid""",
}
