-- The catalog of leasehold: tables and views in schema leasehold, functions in the schema that
-- CREATE EXTENSION chose.
--
-- Functions are PARALLEL UNSAFE: they change shared memory or look under a fresh snapshot.

CREATE SCHEMA leasehold;
GRANT USAGE ON SCHEMA leasehold TO PUBLIC;

-- One row per resource: its T_max and its last durable lease. Written by grants, never by hand: in place, so
-- the column "holder" is padded to the same size in every row. No index but the primary key, and no CHECK
-- constraint: what is written in place is seen by neither.
CREATE TABLE leasehold.ledger (
    resource     text COLLATE "C" PRIMARY KEY,
    token        bigint NOT NULL,
    ttl_us       bigint NOT NULL,
    system       bigint NOT NULL,
    granted_at   timestamptz NOT NULL,
    granted_by   bigint NOT NULL,
    broken_by    bigint NOT NULL,
    request      uuid NOT NULL,
    database     oid NOT NULL,
    role         oid NOT NULL,
    holder_bytes smallint NOT NULL,
    released     boolean NOT NULL,
    has_request  boolean NOT NULL,
    holder       text NOT NULL
);

COMMENT ON TABLE leasehold.ledger IS 'durable: one row per resource, its highest token and its last lease';
COMMENT ON COLUMN leasehold.ledger.token IS 'T_max: the highest token granted for the resource';
COMMENT ON COLUMN leasehold.ledger.ttl_us IS 'longest TTL of that lease, microseconds';
COMMENT ON COLUMN leasehold.ledger.granted_by IS 'the (sub)transaction of the grant, as a full transaction id: without its commit there is no lease';
COMMENT ON COLUMN leasehold.ledger.broken_by IS 'the (sub)transaction that broke it, or 0: with its commit the lease is over';
COMMENT ON COLUMN leasehold.ledger.request IS 'where has_request: what acquire_lease was given, to know a retry';
COMMENT ON COLUMN leasehold.ledger.holder IS 'its first holder_bytes bytes are the label';
COMMENT ON COLUMN leasehold.ledger.system IS 'system identifier of the cluster that granted it';
COMMENT ON COLUMN leasehold.ledger.database IS 'database that granted it';

-- Of the leases that were given metadata; a row of an older token than the ledger's is of no lease any more.
CREATE TABLE leasehold.metadata (
    resource text COLLATE "C" PRIMARY KEY,
    token    bigint NOT NULL,
    metadata jsonb NOT NULL
);

COMMENT ON TABLE leasehold.metadata IS 'what acquire_lease was given to keep with a lease';

-- Who may acquire what. Changed by allow_lease() and disallow_lease(), which tell the backends that remember it.
CREATE TABLE leasehold.rule (
    resource   text COLLATE "C",
    role       regrole,
    granted_by regrole NOT NULL,
    granted_at timestamptz NOT NULL,
    PRIMARY KEY (resource, role)
);

COMMENT ON TABLE leasehold.rule IS 'which roles may acquire which resources: see the view leasehold.rights';

CREATE VIEW leasehold.rights AS
    SELECT resource, role, granted_by, granted_at FROM leasehold.rule
     WHERE role::oid IN (SELECT oid FROM pg_catalog.pg_roles);
GRANT SELECT ON leasehold.rights TO PUBLIC;

CREATE SEQUENCE leasehold.token_seq AS bigint NO CYCLE;

-- Numbers that must be durable at once, whatever becomes of the transaction that raises them. They are about
-- this server, so they do not go into a dump.
CREATE SEQUENCE leasehold.epoch_base AS bigint MINVALUE 0 NO CYCLE;
COMMENT ON SEQUENCE leasehold.epoch_base IS 'the epoch of the tokens of timeline 1; each promotion adds one';
CREATE SEQUENCE leasehold.epoch_system AS bigint MINVALUE -9223372036854775808 NO CYCLE;
COMMENT ON SEQUENCE leasehold.epoch_system IS 'system identifier of the cluster that epoch_base is about';
CREATE SEQUENCE leasehold.lost_up_to AS bigint MINVALUE 0 NO CYCLE;
COMMENT ON SEQUENCE leasehold.lost_up_to IS 'leases of tokens up to this one were lost with a promotion, or came with a dump';
CREATE SEQUENCE leasehold.longest_ttl AS bigint MINVALUE 0 NO CYCLE;
COMMENT ON SEQUENCE leasehold.longest_ttl IS 'longest TTL ever granted in the ledger, microseconds: so long nothing is granted after a lossy promotion';
CREATE SEQUENCE leasehold.memory_ttl AS bigint MINVALUE 0 NO CYCLE;
COMMENT ON SEQUENCE leasehold.memory_ttl IS 'longest TTL ever granted in memory, microseconds: so long nothing is granted after a restart';

-- The T_max of a resource and the position of the tokens go into a dump.
SELECT pg_catalog.pg_extension_config_dump('leasehold.ledger', '');
SELECT pg_catalog.pg_extension_config_dump('leasehold.token_seq', '');
SELECT pg_catalog.pg_extension_config_dump('leasehold.metadata', '');
SELECT pg_catalog.pg_extension_config_dump('leasehold.rule', 'WHERE role::oid IN (SELECT oid FROM pg_catalog.pg_roles)');

CREATE FUNCTION leasehold.home(OUT system bigint, OUT database oid, OUT timeline bigint)
RETURNS SETOF record LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_home';
REVOKE ALL ON FUNCTION leasehold.home() FROM PUBLIC;

-- The server that writes the ledger: tells a restart from a promotion and from a copy. A restored dump has the
-- numbers of its CREATE EXTENSION.
CREATE SEQUENCE leasehold.home_system AS bigint MINVALUE -9223372036854775808 NO CYCLE;
COMMENT ON SEQUENCE leasehold.home_system IS 'system identifier of the cluster that writes the ledger';
CREATE SEQUENCE leasehold.home_database AS bigint MINVALUE 0 NO CYCLE;
COMMENT ON SEQUENCE leasehold.home_database IS 'the database in which it is written';
CREATE SEQUENCE leasehold.home_timeline AS bigint MINVALUE 0 NO CYCLE;
COMMENT ON SEQUENCE leasehold.home_timeline IS 'the timeline on which it is written';

SELECT pg_catalog.setval('leasehold.home_system', system),
       pg_catalog.setval('leasehold.home_database', database::bigint),
       pg_catalog.setval('leasehold.home_timeline', timeline)
  FROM leasehold.home();

CREATE FUNCTION acquire_lease(resource text, holder text DEFAULT NULL, ttl interval DEFAULT NULL,
    wait interval DEFAULT '0', request uuid DEFAULT NULL, metadata jsonb DEFAULT NULL)
RETURNS bigint LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_acquire_lease';

CREATE PROCEDURE await_lease(resource text, holder text DEFAULT NULL, ttl interval DEFAULT NULL,
    wait interval DEFAULT NULL, INOUT token bigint DEFAULT NULL)
LANGUAGE c AS 'MODULE_PATHNAME', 'leasehold_await_lease';

CREATE FUNCTION renew_lease(resource text, token bigint, ttl interval DEFAULT NULL)
RETURNS boolean LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_renew_lease';

CREATE FUNCTION release_lease(resource text, token bigint)
RETURNS boolean LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_release_lease';

CREATE FUNCTION fence(resource text, token bigint)
RETURNS void LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_fence';

CREATE FUNCTION check_fence(resource text, token bigint)
RETURNS boolean LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_check_fence';

CREATE FUNCTION fenced()
RETURNS trigger LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_fenced';

CREATE FUNCTION fence_table(target regclass, resource text, token_column name DEFAULT NULL, strict boolean DEFAULT false)
RETURNS void LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'leasehold_fence_table';

CREATE FUNCTION unfence_table(target regclass)
RETURNS void LANGUAGE c VOLATILE SET search_path = pg_catalog, pg_temp
AS 'MODULE_PATHNAME', 'leasehold_unfence_table';

CREATE TYPE leasehold.lease AS (
    resource   text,
    token      bigint,
    holder     text,
    state      text,
    ttl        interval,
    remaining  interval,
    granted_at timestamptz,
    renewed_at timestamptz,
    role       regrole,
    pid        integer,
    durable    boolean,
    writers    integer,
    waiters    integer,
    metadata   jsonb
);

CREATE FUNCTION lease_info(resource text)
RETURNS SETOF leasehold.lease LANGUAGE c VOLATILE ROWS 1 AS 'MODULE_PATHNAME', 'leasehold_lease_info';

CREATE FUNCTION allow_lease(resource text, to_role regrole)
RETURNS void LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_allow_lease';

CREATE FUNCTION disallow_lease(resource text, to_role regrole)
RETURNS void LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_disallow_lease';

CREATE FUNCTION break_lease(resource text)
RETURNS bigint LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_break_lease';

CREATE TYPE leasehold.waiter AS (
    resource text,
    position integer,
    pid      integer,
    holder   text,
    role     regrole,
    waited   interval,
    remaining interval
);

CREATE FUNCTION leasehold.all_waiters()
RETURNS SETOF leasehold.waiter LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_all_waiters';

CREATE VIEW leasehold.waiters AS SELECT * FROM leasehold.all_waiters();
GRANT SELECT ON leasehold.waiters TO PUBLIC;

CREATE FUNCTION leasehold.all_fences(OUT resource text, OUT classid oid, OUT objid oid)
RETURNS SETOF record LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_all_fences';

-- The transactions that hold the fence of a resource: by process, or by the name under which they are prepared. The
-- resource is NULL where the shared table does not know it. 19528 is the class of fence locks; a
-- prepared transaction keeps the virtual id of the session that prepared it.
CREATE VIEW leasehold.writers AS
    SELECT f.resource, l.pid, p.gid
      FROM pg_catalog.pg_locks l
      JOIN pg_catalog.pg_database d ON d.oid = l.database AND d.datname = current_database()
      LEFT JOIN leasehold.all_fences() f ON f.classid = l.classid AND f.objid = l.objid
      LEFT JOIN pg_catalog.pg_locks own ON l.pid IS NULL AND own.pid IS NULL
       AND own.virtualtransaction = l.virtualtransaction AND own.locktype = 'transactionid'
      LEFT JOIN pg_catalog.pg_prepared_xacts p ON p.transaction = own.transactionid
     WHERE l.locktype = 'advisory' AND l.objsubid = 19528 AND l.granted;
GRANT SELECT ON leasehold.writers TO PUBLIC;

CREATE TYPE leasehold.stat AS (
    since          timestamptz,
    grants         bigint,
    denials        bigint,
    sheds          bigint,
    waits          bigint,
    renewals       bigint,
    releases       bigint,
    expiries       bigint,
    takeovers      bigint,
    drains         bigint,
    sessions_ended bigint,
    fence_checks   bigint,
    refused_lh001  bigint,
    refused_lh002  bigint,
    refused_lh003  bigint,
    refused_lh004  bigint,
    refused_lh005  bigint,
    refused_lh006  bigint,
    wait_ms_p50    double precision,
    wait_ms_p99    double precision,
    hold_ms_p50    double precision,
    hold_ms_p99    double precision
);

CREATE FUNCTION leasehold.all_stats()
RETURNS SETOF leasehold.stat LANGUAGE c VOLATILE ROWS 1 AS 'MODULE_PATHNAME', 'leasehold_all_stats';

CREATE VIEW leasehold.stats AS SELECT * FROM leasehold.all_stats();
GRANT SELECT ON leasehold.stats TO PUBLIC;

CREATE FUNCTION leasehold.reset_stats()
RETURNS void LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_reset_stats';
REVOKE ALL ON FUNCTION leasehold.reset_stats() FROM PUBLIC;

CREATE TYPE leasehold.contention AS (
    resource     text,
    grants       bigint,
    denials      bigint,
    sheds        bigint,
    waits        bigint,
    wait_ms_mean double precision,
    hold_ms      double precision,
    waiters      integer
);

CREATE FUNCTION leasehold.all_contended()
RETURNS SETOF leasehold.contention LANGUAGE c VOLATILE ROWS 100 AS 'MODULE_PATHNAME', 'leasehold_all_contended';

CREATE VIEW leasehold.contended AS SELECT * FROM leasehold.all_contended();
GRANT SELECT ON leasehold.contended TO PUBLIC;

CREATE TYPE leasehold.event AS (
    seq              bigint,
    at               timestamptz,
    event            text,
    resource         text,
    token            bigint,
    presented        bigint,
    holder           text,
    sqlstate         text,
    relation         regclass,
    role             regrole,
    pid              integer,
    application_name text
);

CREATE FUNCTION leasehold.all_events()
RETURNS SETOF leasehold.event LANGUAGE c VOLATILE ROWS 4096 AS 'MODULE_PATHNAME', 'leasehold_all_events';
REVOKE ALL ON FUNCTION leasehold.all_events() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION leasehold.all_events() TO pg_read_all_stats;

CREATE VIEW leasehold.events AS SELECT * FROM leasehold.all_events();
GRANT SELECT ON leasehold.events TO pg_read_all_stats;

CREATE FUNCTION leasehold.all_leases()
RETURNS SETOF leasehold.lease LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_all_leases';

CREATE VIEW leasehold.leases AS SELECT * FROM leasehold.all_leases();
GRANT SELECT ON leasehold.leases TO PUBLIC;
