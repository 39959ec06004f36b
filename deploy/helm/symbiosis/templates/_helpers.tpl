{{- define "symbiosis.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "symbiosis.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "symbiosis.labels" -}}
{{ include "symbiosis.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "symbiosis.secretName" -}}
{{ .Values.secret.existing | default (include "symbiosis.fullname" .) }}
{{- end -}}

{{/* Image and rights of every container. */}}
{{- define "symbiosis.container" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Fields of every pod. */}}
{{- define "symbiosis.pod" -}}
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "symbiosis.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The cluster's secret as a file that only its owner can read: with fsGroup, a mounted Secret is readable by the group. */}}
{{- define "symbiosis.secretFile" -}}
- name: secret-file
  {{- include "symbiosis.container" . | nindent 2 }}
  command: [install, -m, "600", /run/secrets/symbiosis/cluster, /run/symbiosis/secret]
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: secret, mountPath: /run/secrets/symbiosis, readOnly: true}
    - {name: run, mountPath: /run/symbiosis}
{{- end -}}

{{- define "symbiosis.volumes" -}}
- name: secret
  secret:
    secretName: {{ include "symbiosis.secretName" . }}
    items: [{key: cluster, path: cluster}]
- name: run
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {sizeLimit: {{ .Values.cache.sizeLimit }}}
- name: shared-mem
  emptyDir: {medium: Memory, sizeLimit: 1Gi}
{{- with .Values.model.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "symbiosis.mounts" -}}
- {name: run, mountPath: /run/symbiosis}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/symbiosis}
- {name: shared-mem, mountPath: /dev/shm}
{{- if .Values.model.existingClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{- define "symbiosis.dataVolume" -}}
- name: data
  persistentVolumeClaim:
    claimName: {{ .Values.uploads.existingClaim | default (printf "%s-uploads" (include "symbiosis.fullname" .)) }}
{{- end -}}

{{- define "symbiosis.dataMount" -}}
- {name: data, mountPath: /data}
{{- end -}}

{{/* Of containers with engines or the front door: credentials of the store. */}}
{{- define "symbiosis.envFrom" -}}
{{- with .Values.store.existingSecret -}}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end -}}
{{- end -}}

{{- define "symbiosis.env" -}}
- name: HOME
  value: /home/symbiosis
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Options that `cluster up` and `cluster join` share. */}}
{{- define "symbiosis.engineArgs" -}}
- --secret-file=/run/symbiosis/secret
- --device={{ .Values.engine.device }}
- --threads={{ .Values.engine.threads }}
{{- range .Values.engine.args }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Resources of a pod with so many engines. */}}
{{- define "symbiosis.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if eq .engine.device "cuda" -}}
{{- $_ := set $resources "limits" (set ($resources.limits | default dict) .engine.gpuResource .engines) -}}
{{- end -}}
resources: {{ toYaml $resources | nindent 2 }}
{{- end -}}

{{/* The front door and the director: `symbiosis cluster up`. */}}
{{- define "symbiosis.frontDoor" -}}
name: front-door
{{ include "symbiosis.container" . }}
args:
  - cluster
  - up
  {{- with .Values.model.name }}
  - {{ . | quote }}
  {{- end }}
  - --http=0.0.0.0:8000
  - --host=$(POD_IP)
  - --port=7778
  - --state=/data/state
  - --uploads=/data/uploads
  {{- with .Values.store.url }}
  - {{ printf "--store=%s" . | quote }}
  {{- end }}
  - --http-workers={{ .Values.frontDoor.httpWorkers }}
  - --shutdown-delay={{ .Values.frontDoor.shutdownDelaySeconds }}
  {{- if eq .Values.mode "kuberay" }}
  - --launcher=ray
  - --ray-address=$(POD_IP):6379
  - --engines={{ mul .Values.engines.replicas .Values.engines.perPod }}
  - --max-engines={{ mul .Values.engines.maxReplicas .Values.engines.perPod }}
  {{- else }}
  - --launcher=processes
  - --engines={{ .Values.frontDoor.engines }}
  {{- end }}
  {{- include "symbiosis.engineArgs" . | nindent 2 }}
  {{- range .Values.frontDoor.args }}
  - {{ . | quote }}
  {{- end }}
{{ include "symbiosis.envFrom" . }}
env:
  {{- include "symbiosis.env" . | nindent 2 }}
  - name: SYMBIOSIS_KEYS
    valueFrom: {secretKeyRef: {name: {{ include "symbiosis.secretName" . }}, key: keys}}
  - name: SYMBIOSIS_ADMIN_KEY
    valueFrom: {secretKeyRef: {name: {{ include "symbiosis.secretName" . }}, key: admin-key}}
  {{- if eq .Values.mode "kuberay" }}
  {{- include "symbiosis.rayEnv" . | nindent 2 }}
  {{- end }}
ports:
  - {name: http, containerPort: 8000}
  - {name: director, containerPort: 7778}
startupProbe:
  httpGet: {path: /live, port: http}
  periodSeconds: 5
  failureThreshold: {{ div .Values.frontDoor.startupSeconds 5 }}
livenessProbe:
  httpGet: {path: /live, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /ready, port: http}
  periodSeconds: 3
  timeoutSeconds: 3
  failureThreshold: 1
volumeMounts:
  {{- include "symbiosis.dataMount" . | nindent 2 }}
  {{- include "symbiosis.mounts" . | nindent 2 }}
{{- end -}}

{{/* All processes of Ray have one token. Without OMP_NUM_THREADS Ray sets 1. */}}
{{- define "symbiosis.rayEnv" -}}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "symbiosis.secretName" . }}, key: ray-token}}
- name: RAY_memory_monitor_refresh_ms
  value: "0"
- name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO
  value: "0"
- name: OMP_NUM_THREADS
  value: {{ .Values.engine.threads | quote }}
{{- end -}}
