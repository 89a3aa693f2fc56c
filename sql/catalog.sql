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
    database     oid NOT NULL,
    role         oid NOT NULL,
    holder_bytes smallint NOT NULL,
    released     boolean NOT NULL,
    holder       text NOT NULL
);

COMMENT ON TABLE leasehold.ledger IS 'durable: one row per resource, its highest token and its last lease';
COMMENT ON COLUMN leasehold.ledger.token IS 'T_max: the highest token granted for the resource';
COMMENT ON COLUMN leasehold.ledger.ttl_us IS 'longest TTL of that lease, microseconds';
COMMENT ON COLUMN leasehold.ledger.granted_by IS 'the (sub)transaction of the grant, as a full transaction id: without its commit there is no lease';
COMMENT ON COLUMN leasehold.ledger.holder IS 'its first holder_bytes bytes are the label';
COMMENT ON COLUMN leasehold.ledger.system IS 'system identifier of the cluster that granted it';
COMMENT ON COLUMN leasehold.ledger.database IS 'database that granted it';

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

CREATE FUNCTION acquire_lease(resource text, holder text DEFAULT NULL, ttl interval DEFAULT NULL)
RETURNS bigint LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_acquire_lease';

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
    writers    integer
);

CREATE FUNCTION lease_info(resource text)
RETURNS SETOF leasehold.lease LANGUAGE c VOLATILE ROWS 1 AS 'MODULE_PATHNAME', 'leasehold_lease_info';

CREATE FUNCTION leasehold.all_leases()
RETURNS SETOF leasehold.lease LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'leasehold_all_leases';

CREATE VIEW leasehold.leases AS SELECT * FROM leasehold.all_leases();
GRANT SELECT ON leasehold.leases TO PUBLIC;
